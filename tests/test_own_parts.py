"""Data modules, training loops, Lightning modules and metrics of a user's own: the documented protocols."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from short_runs import folder_of
from small import SHALLOW, build
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_task import KillAfter, make_task, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gsm
from gsm.checkpoint import newest
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import CheckpointError
from gsm.config.stored import read_checkpoint
from gsm.data.base import DataModule, next_tokens, require_data_module
from gsm.data.loader import Batches
from gsm.evaluation.held_out import WHOLE, HeldOut
from gsm.evaluation.records import mean
from gsm.paths import ROOT
from gsm.training.callbacks.checkpoints import Latest
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.folder import begin
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW
from gsm.training.run import train

PLAIN = """
import lightning
import torch
from torch.utils.data import DataLoader

from gsm.data.base import DataModule


class Counting(DataModule):
    def __init__(self, length: int, vocabulary: int, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        start = torch.arange(64)
        self.rows = [{"tokens": (torch.arange(length) + first) % vocabulary} for first in start]

    def train_dataloader(self):
        return DataLoader(self.rows[:48], self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows[48:], self.batch_size)


class Counted(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("mine/first_token", batch["tokens"][0, 0].float())
"""
WORDS = "size=pico size.vocabulary=64 data=mine trainer=cpu trainer.max_steps=6 trainer.log_every_n_steps=2"
WORDS += " trainer.val_check_interval=4 +callbacks.pictures.sequences=2"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's yaml files, beside the module that they name."""
    (tmp_path / "own_parts.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "configs/data").mkdir(parents=True)
    lines = ["_target_: own_parts.Counting", "length: 24", "vocabulary: ${size.vocabulary}"]
    lines.append("batch_size: ${recipe.batch_size}")
    (tmp_path / "configs/data/mine.yaml").write_text("\n".join(lines))
    return tmp_path / "configs"


def test_a_data_module_of_ones_own_trains_and_a_metric_of_ones_own_is_in_every_log(
    mine: Path, monkeypatch: pytest.MonkeyPatch
):
    words = [*WORDS.split(), "arm=gsm", f"logs={mine.parent / 'logs'}", "+callbacks.mine._target_=own_parts.Counted"]
    facts = train(compose(words, [mine]))
    assert facts["status"] == "finished" and facts["val_loss"] > 0 and facts["bits_per_byte"] is None
    assert facts["memory_after_tokens"] == 24
    folder = folder_of(mine.parent / "logs/default")
    assert sorted(read_metrics(folder / "metrics.jsonl")["mine/first_token"]) == [2, 4, 6]
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert [point.step for point in events.Scalars("mine/first_token")] == [2, 4, 6]
    assert [point.step for point in events.Scalars("val/loss")] == [4, 6]
    assert gsm.load_model(folder, directories=[mine]).vocabulary == 64
    monkeypatch.setenv("GSM_CONFIGS", str(mine))
    result = HeldOut(str(folder)).evaluate()[0]
    loss = result.where(**WHOLE)
    assert [record["weight"] for record in loss] == [23] * 16 and result.settings["questions"]["of"] == 16
    assert mean(loss) == pytest.approx(facts["val_loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="^context .*8"):
        HeldOut(str(folder), context=8).evaluate()


def test_data_of_another_class_are_refused():
    for data in ([], lightning.LightningDataModule()):
        with pytest.raises(ConfigError, match=f"^data .*{type(data).__name__}"):
            require_data_module(data)


class Numbers(DataModule):
    """Batches by number, from the first one that training has not done."""

    context, batch_size, resumes = 16, 4, True

    def train_dataloader(self) -> Batches:
        return Batches(self, self._plan, 24)  # pyright: ignore[reportArgumentType] # it has a `batch`

    def val_dataloader(self) -> Batches:
        return Batches(self, lambda: iter([np.arange(4)]), 1)  # pyright: ignore[reportArgumentType]

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        rows = [torch.randint(257, (16,), generator=torch.Generator().manual_seed(int(index))) for index in indices]
        token_BT = torch.stack(rows)
        return {"tokens": token_BT, "targets": next_tokens(token_BT), "documents": torch.zeros_like(token_BT)}

    def _plan(self) -> Iterator[np.ndarray]:
        for number in range(self.batches_done, self.batches_done + 24):
            yield np.arange(4 * number, 4 * number + 4)


def test_a_data_module_that_asks_where_training_stands_resumes_exactly(tmp_path: Path):
    def run(folder: Path, stop: int = 12, resume: Path | None = None) -> LanguageModeling:
        torch.manual_seed(0)
        task, callbacks = make_task(), [Latest(folder, minutes=1e-9), KillAfter(stop)]
        trainer = make_trainer(tmp_path, 12, callbacks, limit_val_batches=1, accumulate_grad_batches=2)
        with contextlib.suppress(ZeroDivisionError):
            trainer.fit(task, datamodule=Numbers(), ckpt_path=resume, weights_only=True)
        return task

    straight = run(tmp_path / "straight").state_dict()
    run(tmp_path, 7)
    assert (last := newest(tmp_path)) == tmp_path / "checkpoints/step_00000006"
    resumed = run(tmp_path, resume=last).state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())


def test_targets_are_the_next_tokens_of_the_same_document():
    tokens_BT = torch.tensor([[5, 6, 7, 8]])
    assert next_tokens(tokens_BT).tolist() == [[6, 7, 8, -100]]
    assert next_tokens(tokens_BT, torch.tensor([[0, 0, 1, 1]])).tolist() == [[6, -100, 8, -100]]


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(SHALLOW.vocabulary, (2, 20), generator=generator) for _ in range(count)]
    return [{"tokens": token_BT, "targets": next_tokens(token_BT)} for token_BT in ids]


def fitted(task: lightning.LightningModule, folder: Path, *validation: DataLoader) -> None:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", devices=1, gradient_clip_val=1.0, log_every_n_steps=2, limit_val_batches=0,
        default_root_dir=folder, **quiet,
    )  # fmt: skip
    trainer.fit(task, DataLoader(batches(4), batch_size=None), *validation)  # pyright: ignore[reportArgumentType]


def test_a_users_loop_trains_as_the_lightning_module_does(tmp_path: Path):
    """The loop adds the model's losses to the cross-entropy, and clips the indexer's gradients separately."""
    settings = AdamW(learning_rate=3e-3, warmup_steps=0, final_fraction=1.0, weight_decay=0.1)
    expected = build("gsm-retriever=separate_indexer", geometry=SHALLOW).float().train()
    model = build("gsm-retriever=separate_indexer", geometry=SHALLOW).float().train()
    model.load_state_dict(expected.state_dict())
    fitted(LanguageModeling(expected, settings), tmp_path, DataLoader(batches(1), batch_size=None))  # pyright: ignore

    optimizer = settings.build(model.parameter_groups())
    for batch in batches(4):
        out = model(batch["tokens"], targets=batch["targets"])
        assert out.losses, "a model with an indexer has a loss for it"
        (out.loss + sum(out.losses.values())).backward()
        for indexer in (False, True):
            groups = [g for g in optimizer.param_groups if g["name"].startswith("indexer") == indexer]
            nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


class Own(lightning.LightningModule):
    """A user's Lightning module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, _: int) -> Tensor:
        out = self.model(batch["tokens"], targets=batch["targets"])
        self.log("loss", out.loss)
        return out.loss + sum(out.losses.values())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def test_a_lightning_module_of_ones_own_trains_a_model(tmp_path: Path):
    model = build("gsm", geometry=SHALLOW).float().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = Own(model)
    fitted(task, tmp_path)
    assert task.trainer.callback_metrics["loss"] > 0
    assert not torch.equal(before["embedding.weight"], model.state_dict()["embedding.weight"])


def test_a_checkpoint_of_another_format_is_one_sentence(mine: Path):
    words = [*WORDS.split(), "arm=gsm", f"logs={mine.parent / 'logs'}", "trainer.max_steps=1"]
    train(compose(words, [mine]))
    last = folder_of(mine.parent / "logs/default") / "checkpoints/step_00000001"
    state = json.loads((last / "state.json").read_text())
    (last / "state.json").write_text(json.dumps({**state, "format": 99}))
    message = "step_00000001.* 99"
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(last)
    with pytest.raises(CheckpointError, match=message):
        begin(compose(words, [mine]), {})


@torch.no_grad()
def test_the_retriever_of_the_documentation_selects_the_latest_slots_and_decodes_as_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    page = (ROOT / "docs/retrievers.md").read_text()
    (code,), (text,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "yaml"))
    (tmp_path / "own_retriever.py").write_text(code)
    (tmp_path / "model/retriever").mkdir(parents=True)
    (tmp_path / "model/retriever/latest.yaml").write_text(text.replace("gsm.slots.retriever.latest", "own_retriever"))
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = ["model/retriever=latest", "model.retriever.stride=2"]
    model = gsm.build_model("gsm", size="pico", overrides=asked, directories=[tmp_path]).double().eval()
    token_BT = torch.randint(model.vocabulary, (2, 61), generator=torch.Generator().manual_seed(0))
    with gsm.record("stage/1/top_k") as seen:
        whole = model(token_BT)
    geometry: Any = model.geometry
    latest = [29 - 2 * back for back in range(geometry.top_k)]  # 61 tokens are 30 groups of two
    assert seen["stage/1/top_k"][0, -1].tolist() == latest
    assert seen["stage/1/top_k"][0, 6].tolist() == [2, 0, *[-1] * (len(latest) - 2)], "what a row does not see yet"
    read = model(token_BT[:, :-1], memory=model.start(2))
    decoded = model(token_BT[:, -1:], memory=read.memory)
    torch.testing.assert_close(decoded.logits[:, -1], whole.logits[:, -1])
    assert model.generate(token_BT[0, :9].tolist(), 4).shape == (1, 4)
