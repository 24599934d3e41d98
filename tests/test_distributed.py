"""Several processes that train one model do what one does: with whole models (DDP), and with shares of it (FSDP2)."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import ranks
import torch
import yaml
from short_runs import arguments
from small import SHALLOW, assert_same, build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from gsm import checkpoint
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.layers.experts import Experts, ways_to_divide
from gsm.training import trainer as trainers
from gsm.training.callbacks.checkpoints import Latest
from gsm.training.distributed.ranks import LAUNCHER, RANKS, own_ranks
from gsm.training.distributed.sharded import Sharded, undivided
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW, Muon, keep_names
from gsm.training.run import train

MOE, BASELINE_MOE = "gsm-feed_forward=moe", "baseline-feed_forward=moe"
TRAINED = ("gsm", MOE, "baseline", BASELINE_MOE, "gated_delta_net")


def alone_and_together(processes: Any, folder: Path, case: str, strategy: str, **options: Any) -> list[dict[str, Any]]:
    """What one process finds, and what two do."""
    arguments = (*options.values(),)
    assert ranks.together(processes, 1, ranks.trained, case, "auto", folder, *arguments) == [0]
    assert ranks.together(processes, 2, ranks.trained, case, strategy, folder, *arguments) == [0, 0]
    return [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("auto", strategy)]


def assert_same_run(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Weights, loss, and the norm that gradients were clipped by."""
    assert_same_weights(one, two)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-6)
    assert one["norm"] > 1.0, "nothing was clipped"


def assert_same_weights(one: dict[str, Any], two: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert one["weights"].keys() == two["weights"].keys()
    for name, value in one["weights"].items():
        assert_same(two["weights"][name], value, name, tolerance)


@pytest.fixture(scope="module")
def alone(processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds in two steps."""
    folder = tmp_path_factory.mktemp("alone")
    assert ranks.together(processes, 1, ranks.trained, MOE, "auto", folder, 2) == [0]
    return torch.load(folder / "auto.pt", weights_only=True)


def test_two_processes_with_a_whole_model_each_are_one(processes: Any, tmp_path: Path, alone: dict[str, Any]):
    """Though one rank has fewer targets than the other, and each has sent other rows to the experts."""
    assert ranks.together(processes, 2, ranks.trained, MOE, "ddp", tmp_path, 2) == [0, 0]
    together = torch.load(tmp_path / "ddp.pt", weights_only=True)
    assert_same_run(alone, together)


def test_a_run_obeys_no_earlier_launcher_and_leaves_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Lightning met the ranks of another run at a port that was left over, or waited for ranks that nobody started."""
    for name in (*LAUNCHER, *RANKS, "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    before = dict(os.environ)
    with own_ranks():
        assert not {*LAUNCHER} & os.environ.keys()
        os.environ |= dict.fromkeys(LAUNCHER, "7")  # as Lightning does
    assert dict(os.environ) == before
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    with own_ranks():
        assert os.environ["MASTER_PORT"] == "1"


@pytest.mark.slow
def test_two_processes_with_shares_are_one_and_what_they_save_in_parts_one_reads(
    processes: Any, tmp_path: Path, alone: dict[str, Any]
):
    assert ranks.together(processes, 2, ranks.trained, MOE, "fsdp", tmp_path, 2, torch.float64, True) == [0, 0]
    together = torch.load(tmp_path / "fsdp.pt", weights_only=True)
    assert_same_run(alone, together)
    whole = checkpoint.read(tmp_path / "saved")
    saved = {name.removeprefix("model."): value for name, value in whole["state_dict"].items()}
    assert_same_weights(together, {"weights": saved}, 0.0)
    model = build(MOE, geometry=SHALLOW)
    optimizer = AdamW(3e-3, 2, 0.1, 0.1).build(model.parameter_groups())
    keep_names(optimizer, ((f"model.{name}", parameter) for name, parameter in model.named_parameters()))
    optimizer.load_state_dict(whole["optimizer_states"][0])
    for name, parameter in model.named_parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape, name
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


class Collectives(TorchDispatchMode):
    """Counts the collectives inside the block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def count_collectives(strategy: str, folder: Path) -> None:
    """On a rank: a step of one batch and a step of four, and the collectives and gradients of each."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    for count in (1, 4):
        kept = ranks.Gradients()
        task, trainer = ranks.task_of(MOE), ranks.trainer_of(strategy, 1, kept)
        trainer.accumulate_grad_batches = count
        with Collectives() as counted:
            trainer.fit(task, DataLoader(ranks.batches(world, rank, count), batch_size=None))
        if rank == 0:
            torch.save({"collectives": counted.counts, "gradients": kept.first}, folder / f"{strategy}-{count}.pt")


@pytest.mark.slow
def test_gradients_are_averaged_once_a_step(processes: Any, tmp_path: Path):
    """Once they were after each of its batches: three of four times for nothing."""
    assert ranks.together(processes, 1, count_collectives, "auto", tmp_path) == [0]
    assert ranks.together(processes, 2, count_collectives, "fsdp", tmp_path) == [0, 0]
    one, four, alone = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("fsdp-1", "fsdp-4", "auto-4")
    )
    reduced = [
        sum(number for name, number in found["collectives"].items() if "reduce_scatter" in name)
        for found in (one, four)
    ]
    assert reduced[0] == reduced[1] > 0
    for name, gradient in alone["gradients"].items():
        assert_same(four["gradients"][name], gradient, name, 1e-9)


def several_batches(strategy: str, folder: Path, **given: Any) -> None:
    """On a rank: two steps of two batches each."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    context = given.get("context", 1)
    task, kept = ranks.task_of("gsm"), ranks.Gradients()
    trainer = ranks.trainer_of(strategy, 2, kept, **given)
    trainer.accumulate_grad_batches = 2
    trainer.fit(task, DataLoader(ranks.batches(world // context, rank // context, 4), batch_size=None))
    weights = {name: undivided(value) for name, value in task.model.state_dict().items()}
    if rank == 0:
        torch.save({"weights": weights, "gradients": kept.first}, folder / f"{strategy}.pt")


def divided_and_averaged_each_batch(folder: Path) -> None:
    several_batches("fsdp", folder, context=2, average_each_batch=True)


@pytest.mark.slow
def test_divided_sequences_may_be_averaged_after_each_batch_of_a_step(processes: Any, tmp_path: Path):
    """The way to 64K at 8b_a1p5b on eight GPUs, which have no room for whole gradients."""
    assert ranks.together(processes, 1, several_batches, "auto", tmp_path) == [0]
    assert ranks.together(processes, 2, divided_and_averaged_each_batch, tmp_path) == [0, 0]
    one, two = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("auto", "fsdp"))
    assert_same_weights(one, two)
    for name, gradient in one["gradients"].items():
        assert_same(two["gradients"][name], gradient, name)


OTHERWISE: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": True},
    "partly recomputed": {"recompute": "selective"},
    "gathered once": {"given": {"reshard_after_forward": False}},
    "in bfloat16": {"given": {"gathered": "bfloat16", "reduced": "bfloat16"}},
    "averaged in float32": {"given": {"gathered": "bfloat16", "reduced": "float32"}},
}


def each_way(folder: Path) -> None:
    """On a rank: two steps in all these ways; then a validation, with and without shares."""
    for name, options in OTHERWISE.items():
        (folder / name).mkdir(exist_ok=True)
        ranks.trained(MOE, "fsdp", folder / name, 2, **options)
    for strategy in ("ddp", "fsdp"):
        trainer, batches = ranks.trainer_of(strategy, 1), ranks.batches(2, int(os.environ["RANK"]), 2)
        trainer.validate(ranks.task_of(MOE), DataLoader(batches, batch_size=None), verbose=False)
        if trainer.is_global_zero:
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            (folder / f"{strategy}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_shares_may_be_recomputed_or_travel_in_bfloat16_and_all_ranks_count_what_is_right(
    processes: Any, tmp_path: Path, alone: dict[str, Any]
):
    assert ranks.together(processes, 2, each_way, tmp_path) == [0, 0]
    found = {name: torch.load(tmp_path / name / "fsdp.pt", weights_only=True) for name in OTHERWISE}
    for name in ("recomputed", "partly recomputed", "gathered once"):
        assert_same_run(alone, found[name])
    for name in ("in bfloat16", "averaged in float32"):
        assert found[name]["loss"] == pytest.approx(alone["loss"], rel=0.01) and found[name]["loss"] != alone["loss"]
        apart = [found[name]["gradients"][key] - value for key, value in alone["gradients"].items()]
        norm = torch.stack([value.norm() for value in alone["gradients"].values()]).norm()
        assert torch.stack([value.norm() for value in apart]).norm() < 0.05 * norm
    model, right, counted = build(MOE, geometry=SHALLOW).eval(), 0, 0
    for batch in ranks.batches(steps=2):
        best_BT = model(batch["tokens"], documents=batch["documents"]).logits.argmax(-1)
        right += int((best_BT == batch["targets"]).sum())
        counted += int((batch["targets"] >= 0).sum())
    for strategy in ("ddp", "fsdp"):
        accuracy = json.loads((tmp_path / f"{strategy}.json").read_text())["val/accuracy"]
        assert accuracy == pytest.approx(right / counted, rel=1e-6) and right > 0


@pytest.mark.nightly
@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_they_still_are_after_ten_steps(processes: Any, tmp_path: Path, case: str, strategy: str):
    assert_same_weights(*alone_and_together(processes, tmp_path, case, strategy))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_in_float32_they_begin_with_the_same_gradients_and_arrive_at_the_same_loss(
    processes: Any, tmp_path: Path, strategy: str
):
    one, two = alone_and_together(processes, tmp_path, "gsm", strategy, steps=20, dtype=torch.float32)
    norm = torch.stack([gradient.norm() for gradient in one["gradients"].values()]).norm()
    apart = [(two["gradients"][name] - gradient).norm() for name, gradient in one["gradients"].items()]
    assert torch.stack(apart).norm() < 1e-5 * norm
    assert two["loss"] == pytest.approx(one["loss"], rel=0.01)


@pytest.mark.slow
def test_experts_are_balanced_by_the_loads_of_all_ranks(processes: Any, tmp_path: Path):
    """Each by its own would move the biases apart, and the model with them."""
    assert ranks.together(processes, 2, balanced, tmp_path) == [0, 0]
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    model = build(MOE, geometry=SHALLOW).train()
    batches = [*ranks.batches(2, 0, 1), *ranks.batches(2, 1, 1)]
    load_LE = sum(model(batch["tokens"], batch["documents"]).load_LE for batch in batches)
    assert torch.equal(one["load_LE"], load_LE) and torch.equal(two["load_LE"], load_LE)
    assert not torch.equal(one["own_LE"], two["own_LE"])


def balanced(folder: Path) -> None:
    """On one of two ranks: a step, and what the model was told of its loads."""
    rank = int(os.environ["RANK"])
    task, batch = ranks.task_of(MOE), ranks.batches(2, rank, 1)
    told: list[torch.Tensor] = []
    task.model.rebalance = told.append
    own_LE = build(MOE, geometry=SHALLOW).train()(batch[0]["tokens"], batch[0]["documents"]).load_LE
    ranks.trainer_of("ddp", 1).fit(task, DataLoader(batch, batch_size=None))
    torch.save({"load_LE": told[0], "own_LE": own_LE}, folder / f"{rank}.pt")


DIFFERENT = {  # on rank 1: these once trained to other weights without a word, or waited for ever
    "optimizer.learning_rate": 0.5,
    "seed": 3,
    "trainer.gradient_clip_val": 0.001,
    "trainer.precision": "bf16-mixed",
    "trainer.val_check_interval": 4,
    "trainer.log_every_n_steps": 2,
    "trainer.max_steps": 20,
    "data.batch_size": 2,
    "data.context": 16,
    "callbacks.latest": None,
}


def train_differently(config: dict[str, Any]) -> None:
    """Train, on rank 1 with another configuration."""
    changed = copy.deepcopy(config)
    for key, value in DIFFERENT.items() if os.environ["RANK"] == "1" else ():
        place, _, last = key.rpartition(".")
        (changed[place] if place else changed)[last] = value
    train(changed)


def test_ranks_train_what_the_first_of_them_has_composed(processes: Any, home: Path, tmp_path: Path):
    words = [*arguments(home, "differ"), "trainer=ddp", "trainer.accelerator=cpu", "trainer.max_steps=2"]
    config = compose([*words, f"logs={tmp_path}"])
    assert ranks.together(processes, 2, train_differently, config) == [0, 0]
    (folder,) = (tmp_path / "differ").glob("*-seed*")
    assert str(folder) == config["folder"]
    noted = yaml.safe_load((folder / "config.yaml").read_text())
    assert (noted["seed"], noted["trainer"]["max_steps"]) == (0, 2)


def divided(optimizer: AdamW, strategy: Sharded, *callbacks: lightning.Callback, **options: Any) -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, callbacks=[*callbacks], logger=False)
    trainers.refuse_divided(trainer, LanguageModeling(build("transformer", geometry=SHALLOW), optimizer, **options))


def test_what_cannot_be_divided_is_refused(tmp_path: Path):
    adamw, muon = (kind(1e-3, 2, 0.1, 0.1) for kind in (AdamW, Muon))
    with pytest.raises(ConfigError, match="^optimizer .*muon"):
        divided(muon, Sharded(), Latest(tmp_path))
    with pytest.raises(ConfigError, match="^callbacks.latest .*null"):
        divided(adamw, Sharded())
    for name, strategy in (("trainer.context", Sharded(context=2)), ("trainer.strategy.experts", Sharded(experts=2))):
        with pytest.raises(ConfigError, match=f"^compile .*{name}=2"):
            divided(adamw, strategy, Latest(tmp_path), compile=True)


def test_every_number_of_ranks_that_is_not_among_the_ways_is_refused():
    with torch.device("meta"):
        parts = [Experts(2048, 768, 56, 10.0)]
    for devices in (1, 8, 12, 64, 100, 512, 800):
        for count in set(range(1, 60)) - set(ways_to_divide(parts, devices)):
            with pytest.raises(ConfigError, match=f"^trainer.strategy.experts .*got {count}$"):
                trainers.refuse_shared_experts(parts, count, devices)
        for count in ways_to_divide(parts, devices):
            trainers.refuse_shared_experts(parts, count, devices)
    assert ways_to_divide(parts, 64) == [1, 2, 4, 8] and ways_to_divide(parts, 800) == [1]
    assert ways_to_divide([], 64) == [1]
