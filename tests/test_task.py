"""The training loop, on a stand-in for a model: what it optimises, logs, saves and takes up again."""

from __future__ import annotations

import contextlib
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gsm.checkpoint import newest, steps
from gsm.config.stored import read_checkpoint
from gsm.data.module import TextData
from gsm.training.callbacks.checkpoints import Best, Folders, Latest
from gsm.training.callbacks.metrics_file import MetricsFile, read_metrics
from gsm.training.callbacks.progress import Progress
from gsm.training.callbacks.throughput import Throughput
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW
from gsm.training.resume import ResumeState

VOCABULARY, CONTEXT = 257, 16


class Bigram(nn.Module):
    """The smallest thing that a task can train: the next token from this one, and an indexer that only has a loss."""

    def __init__(self, indexer_weight: float = 1.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.norm = nn.LayerNorm(32)
        self.indexer = nn.Linear(32, 1, bias=False)
        self.indexer_weight = indexer_weight

    def forward(self, tokens: Tensor, documents: Tensor, targets: Tensor) -> SimpleNamespace:
        x_BTD = self.embedding(tokens)
        logits = self.norm(x_BTD) @ self.embedding.weight.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        indexer_loss = self.indexer_weight * self.indexer(x_BTD.detach()).square().mean()
        losses, metrics = {"indexer_kl": indexer_loss}, {"recall": torch.tensor(0.5)}
        return SimpleNamespace(loss=loss, losses=losses, metrics=metrics, load_LE=None)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {
            "decay": [self.embedding.weight],
            "no_decay": list(self.norm.parameters()),
            "indexer_decay": [self.indexer.weight],
            "indexer_no_decay": [],
        }


def settings(**changes: float) -> AdamW:
    return AdamW(**{"learning_rate": 1e-2, "warmup_steps": 4, "final_fraction": 0.1, "weight_decay": 0.1, **changes})


def make_task(model: nn.Module | None = None, **changes: float) -> LanguageModeling:
    lengths_V = torch.ones(VOCABULARY, dtype=torch.int64)
    return LanguageModeling(
        model or Bigram(),
        settings(**changes),
        config={"model": {"_target_": "somewhere.Bigram"}, "stages": [2, 4]},
        notes={"tokenizer": {"kind": "bytes", "json": None}},
        token_bytes_V=lengths_V,
    )


def make_trainer(folder: Path, steps: int, callbacks: list[lightning.Callback] | None = None, **options):
    options = {
        "val_check_interval": 3,
        "limit_val_batches": 0,
        "log_every_n_steps": 2,
        "gradient_clip_val": 1.0,
        **options,
    }
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": None}
    return lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[*(callbacks or []), ResumeState()],
        plugins=[Folders()],
        **quiet | options,
    )


def a_batch(rows: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].clone(),
        "targets": tokens[:, 1:].clone(),
        "documents": torch.zeros(rows, CONTEXT, dtype=torch.int64),
    }


def loader(batches: list[dict[str, Tensor]]) -> DataLoader:
    return DataLoader(batches, batch_size=None)


def fit(trainer: lightning.Trainer, task: LanguageModeling, batches: list[dict[str, Tensor]]) -> None:
    trainer.fit(task, loader(batches), loader([a_batch(seed=99)]))


@pytest.fixture
def text(tmp_path: Path) -> TextData:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"line {number} of some text that goes on. " * 20)
    return TextData(
        vocabulary=VOCABULARY,
        context=CONTEXT,
        batch_size=4,
        tokenizer="bytes",
        path=str(folder),
        validation_sequences=5,
        cache_dir=str(tmp_path / "cache"),
    )


def test_a_fixed_batch_is_memorised(tmp_path: Path):
    trainer = make_trainer(tmp_path, 60)
    fit(trainer, make_task(learning_rate=1e-1), [a_batch(rows=1)] * 60)
    loss = float(trainer.callback_metrics["train/loss"])
    assert loss < 0.5, f"after 60 steps on 16 tokens the loss is still {loss:.2f}"


def test_the_learning_rate_warms_up_and_falls_to_its_fraction():
    rate = [settings(warmup_steps=10).factor(step, 100) for step in range(100)]
    assert rate[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rate) == rate[9] == pytest.approx(1.0)
    assert rate[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rate[9:], rate[10:], strict=False))


def test_a_short_run_does_not_spend_itself_on_warming_up():
    rate = [settings(warmup_steps=1000).factor(step, 8) for step in range(8)]
    assert max(rate) == pytest.approx(1.0), rate


def test_only_groups_that_decay_are_decayed():
    optimizer = settings().build(Bigram().parameter_groups())
    decay = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decay == {"decay": 0.1, "no_decay": 0.0, "indexer_decay": 0.1}


def test_a_parameter_in_no_group_is_an_error(tmp_path: Path):
    model = Bigram()
    model.forgotten = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="Bigram .*'forgotten'"):
        fit(make_trainer(tmp_path, 1), make_task(model), [a_batch()])


def test_a_large_indexer_gradient_does_not_shrink_the_models():
    def clipped(indexer_weight: float) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = Bigram(indexer_weight)
        task = make_task(model)
        optimizer = task.optimizer.build(model.parameter_groups())
        out = model(**a_batch())
        (out.loss + out.losses["indexer_kl"]).backward()
        task.clip(optimizer, 0.1)
        return model.embedding.weight.grad, model.indexer.weight.grad

    gentle, wild = clipped(1.0), clipped(1e6)
    assert torch.equal(gentle[0], wild[0])
    assert float(wild[1].norm()) == pytest.approx(0.1, rel=1e-3), "the indexer itself has to be clipped"


def test_validation_counts_targets_not_batches(tmp_path: Path):
    batches = [a_batch(rows=4, seed=1), a_batch(rows=1, seed=2)]
    batches[1]["targets"][:, 3:] = -100
    task = make_task()
    trainer = make_trainer(tmp_path, 1, limit_val_batches=None)
    trainer.validate(task, loader(batches), verbose=False)
    measured = trainer.callback_metrics
    losses, counts = [], []
    for batch in batches:
        losses.append(float(task.model(**batch).loss.detach()))
        counts.append(int((batch["targets"] != -100).sum()))
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert float(measured["val/loss"]) == pytest.approx(expected, rel=1e-6)
    assert float(measured["val/perplexity"]) == pytest.approx(math.exp(expected), rel=1e-5)
    assert float(measured["val/bits_per_byte"]) == pytest.approx(expected / math.log(2), rel=1e-6), (
        "a byte is a token here"
    )


def test_train_metrics_are_means_over_the_interval(tmp_path: Path):
    trainer = make_trainer(tmp_path, 2, [Throughput()])
    task, batches = make_task(learning_rate=0.0), [a_batch(seed=1), a_batch(seed=2)]
    fit(trainer, task, batches)
    seen = trainer.callback_metrics
    expected = sum(float(task.model(**batch).loss.detach()) for batch in batches) / 2
    assert float(seen["train/loss"]) == pytest.approx(expected, rel=1e-5)
    assert {"train/indexer_kl", "train/recall", "train/gradient_norm", "train/indexer_gradient_norm"} <= seen.keys()
    assert float(seen["train/tokens_per_second"]) > 0
    assert float(seen["train/peak_memory_gib"]) > 0


def test_accumulated_batches_make_one_step(tmp_path: Path):
    trainer = make_trainer(tmp_path, 2, accumulate_grad_batches=3)
    fit(trainer, make_task(), [a_batch(seed=i) for i in range(8)])
    assert trainer.global_step == 2
    assert trainer.fit_loop.epoch_loop.batch_progress.total.processed == 6


def test_a_run_shows_its_time_left_after_twenty_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fit(make_trainer(tmp_path, 23, [Progress()]), make_task(), [a_batch()] * 23)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    shown = {int(line.split()[1].partition("/")[0]): line.endswith(" left") for line in lines}
    assert {20, 22, 23} <= shown.keys() and shown == {step: 20 <= step < 23 for step in shown}


def test_a_save_that_takes_long_is_not_repeated_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a checkpoint of minutes and minutes=2, half of the time went into saving."""
    now, saves = [0.0], []
    monkeypatch.setattr("gsm.training.callbacks.checkpoints.time.monotonic", lambda: now[0])

    class Slow(lightning.Callback):  # ten seconds a step, and a minute to save one
        def on_train_batch_start(self, *_: Any) -> None:
            now[0] += 10.0

        def on_save_checkpoint(self, *_: Any) -> None:
            now[0] += 60.0
            saves.append(now[0])

    trainer = make_trainer(tmp_path, 280, [Slow(), Latest(tmp_path, minutes=2)], log_every_n_steps=1)
    fit(trainer, make_task(), [a_batch()] * 280)
    assert saves[:-1] == [190.0, 1460.0, 2730.0], "once after two minutes, then a minute in every twenty-one"


class Breaking(Bigram):
    """Breaks on a batch that begins with token 7: its loss, or only the gradient of its loss."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, tokens: Tensor, documents: Tensor, targets: Tensor) -> SimpleNamespace:
        out = super().forward(tokens, documents, targets)
        breaks = bool(tokens[0, 0] == 7)
        root = (out.loss * 0).sqrt() if breaks else 0.0  # 0, with an infinite slope
        factor = math.nan if breaks and self.what == "loss" else 1.0
        return SimpleNamespace(loss=out.loss * factor + root, losses={}, metrics={}, load_LE=None)


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_step_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path: Path, what: str):
    batches = [a_batch(seed=i) for i in range(8)]
    for number, batch in enumerate(batches):
        batch["tokens"][0, 0] = 7 if number == 5 else 8
    trainer = make_trainer(tmp_path, 4, [Throughput(), Latest(tmp_path, 1e-9, 1e9)], accumulate_grad_batches=2)
    with pytest.raises(FloatingPointError, match=f" {what} of step 2 "):
        fit(trainer, make_task(Breaking(what)), batches)
    last = read_checkpoint(tmp_path)
    assert last["global_step"] == 2
    assert all(value.isfinite().all() for value in last["state_dict"].values())


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where nothing is read back at the step itself."""
    whole = LanguageModeling._refuse_broken

    def look(self: LanguageModeling, name: str, value: Tensor) -> None:
        whole(self, name, value if "up to" in name else torch.ones(()))

    monkeypatch.setattr(LanguageModeling, "_refuse_broken", look)


class Unlearned(Bigram):
    """Has an infinite loss without a gradient."""

    def forward(self, tokens: Tensor, documents: Tensor, targets: Tensor) -> SimpleNamespace:
        out = super().forward(tokens, documents, targets)
        return SimpleNamespace(**vars(out) | {"losses": {"balance": torch.tensor(torch.inf)}})


@pytest.mark.parametrize(
    ("model", "name"),
    [(Breaking("loss"), "loss"), (Breaking("gradient norm"), "gradient norm"), (Unlearned(), "loss")],
    ids=["loss", "gradient", "loss without a gradient"],
)
def test_a_broken_step_is_found_at_the_end_of_its_interval(tmp_path: Path, late: None, model: nn.Module, name: str):
    batches = [a_batch(seed=i) for i in range(8)]
    batches[5]["tokens"][0, 0] = 7
    last = 2 if isinstance(model, Unlearned) else 6
    with pytest.raises(FloatingPointError, match=f" {name} of a step up to {last} "):
        fit(make_trainer(tmp_path, 8, log_every_n_steps=2), make_task(model), batches)


def test_a_model_that_broke_inside_of_an_interval_is_not_saved(tmp_path: Path, late: None):
    """A run that was stopped there, by a callback, wrote its weights of NaN over a sound checkpoint."""
    batches = [a_batch(seed=i) for i in range(8)]
    batches[5]["tokens"][0, 0] = 7
    saving = [StopAfter(7), Latest(tmp_path, 1e-9, 1e9)]
    with pytest.raises(FloatingPointError, match="a step up to 7 "):
        fit(make_trainer(tmp_path, 8, saving, log_every_n_steps=4), make_task(Breaking("loss")), batches)
    assert read_checkpoint(tmp_path)["global_step"] == 4


class Dropping(Bigram):
    """Draws from three generators in every forward pass."""

    def forward(self, tokens: Tensor, documents: Tensor, targets: Tensor) -> SimpleNamespace:
        noise = float(np.random.rand()) + random.random()
        out = super().forward(tokens, documents, targets)
        return SimpleNamespace(loss=out.loss * (1 + noise * torch.rand(())), losses={}, metrics={}, load_LE=None)


@pytest.mark.parametrize("steps", [5, 6, 10])
def test_a_resumed_run_draws_the_same_numbers_and_logs_the_same_means(tmp_path: Path, text: TextData, steps: int):
    def run(name: str, stop: int = 12, resume: Path | None = None) -> dict[str, dict[int, float]]:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        log = MetricsFile(tmp_path / f"{name}.jsonl")
        saving = [Latest(tmp_path, minutes=1e-9), *([KillAfter(stop)] if stop < 12 else [])]
        trainer = make_trainer(tmp_path, 12, saving, limit_val_batches=1, log_every_n_steps=5, logger=log)
        with contextlib.suppress(ZeroDivisionError):
            trainer.fit(make_task(Dropping()), datamodule=text, ckpt_path=resume, weights_only=True)
        return read_metrics(log.path)

    straight = run("straight")
    run("resumed", steps)
    assert run("resumed", resume=newest(tmp_path)) == straight


def test_the_last_checkpoint_is_of_the_last_step_even_if_it_is_not_the_best(tmp_path: Path):
    getting_worse = make_task(learning_rate=1.0)
    trainer = make_trainer(tmp_path, 6, [Latest(tmp_path)], limit_val_batches=None)
    fit(trainer, getting_worse, [a_batch(seed=i) for i in range(6)])
    assert read_checkpoint(tmp_path)["global_step"] == 6


@pytest.mark.parametrize(
    ("metric", "mode", "best"),
    [("val/accuracy", None, 6), ("val/f1", "max", 6), ("val/error", "min", 9), ("val/accuracy", "min", 9)],
)
def test_the_best_checkpoint_has_the_best_value_of_its_metric(tmp_path: Path, metric: str, mode: str | None, best: int):
    """By accuracy it had the lowest."""
    judges = [Measured(metric, [0.2, 0.3, 0.1, 0.2]), Best(tmp_path, metric, mode)]
    fit(make_trainer(tmp_path, 12, judges, limit_val_batches=None), make_task(), [a_batch()] * 12)
    assert [step.name for step in steps(tmp_path)] == [f"step_{best:08}"] and judges[1].step == best


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the state of the other metric is left
@pytest.mark.parametrize(("metric", "best"), [("val/one", 3), ("val/two", 12)])
def test_a_run_that_goes_on_with_another_metric_is_judged_anew(tmp_path: Path, metric: str, best: int):
    """The lowest loss was compared with perplexities."""
    for length, judged, values in ((6, "val/one", [1.0, 2.0]), (12, metric, [4.0, 3.0])):
        judges = [Measured(judged, values), Best(tmp_path, judged, "min"), Latest(tmp_path)]
        trainer = make_trainer(tmp_path, length, judges, limit_val_batches=None)
        trainer.fit(make_task(), loader([a_batch()] * 12), loader([a_batch()]), ckpt_path=newest(tmp_path))
    assert {step.name for step in steps(tmp_path)} == {f"step_{best:08}", "step_00000012"}


def test_a_checkpoint_holds_plain_containers_and_all_that_generation_needs(tmp_path: Path):
    trainer = make_trainer(tmp_path, 1, [Throughput(), Latest(tmp_path)])
    fit(trainer, make_task(), [a_batch()])
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint["hyper_parameters"] == {"config": {"model": {"_target_": "somewhere.Bigram"}, "stages": [2, 4]}}
    assert checkpoint["tokenizer"] == {"kind": "bytes"}
    assert sorted(checkpoint["state_dict"]) == [f"model.{name}" for name in sorted(Bigram().state_dict())]


class Measured(lightning.Callback):
    """Logs the next value of a metric at each validation."""

    def __init__(self, name: str, values: list[float]) -> None:
        self.name, self.values = name, iter(values)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        pl_module.log(self.name, next(self.values))


class StopAfter(lightning.Callback):
    """Ends a run early, as an interruption would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.steps


class KillAfter(lightning.Callback):
    """Ends a run at the first batch after a step, in the way of an error."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        if trainer.global_step == self.steps + 1:
            raise ZeroDivisionError
