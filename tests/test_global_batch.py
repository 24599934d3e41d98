"""`global_batch` is the sequences of a step on all devices: however many there are, or it is refused with what fits."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from short_runs import TINY, arguments, assemble

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.experiments.runs import Experiment
from gsm.training import run as fit
from gsm.training import trainer as trainers


@lru_cache
def composed(*given: str) -> dict[str, Any]:
    return compose(given)


def config(*given: str, **trainer: Any) -> dict[str, Any]:
    made = copy.deepcopy(composed("trainer=cpu", *given))
    made["trainer"] |= trainer
    return made


@pytest.mark.parametrize("size", ["0p5b", "1p5b", "8b_a1p5b"])
@pytest.mark.parametrize(
    ("devices", "nodes", "batches"), [(1, 1, 32), ("auto", 1, 32), (8, 1, 4), (8, 2, 2), (16, 2, 1)]
)
def test_the_papers_steps_have_128_sequences_on_any_number_of_devices(
    size: str, devices: int | str, nodes: int, batches: int
):
    """Two nodes of eight took 256, and 64 devices accumulated no batch at all. `auto` on a processor is one."""
    made = config(f"size={size}", devices=devices, num_nodes=nodes, strategy="ddp")
    world = trainers.ranks_in(made) or 0
    assert world == (1 if devices == "auto" else devices) * nodes
    assert trainers.batches_a_step(made, world) == batches
    assert batches * world * made["data"]["batch_size"] == 128


def test_what_torchrun_has_started_counts(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    chosen = trainers.trainer_arguments(config("trainer=ddp"))
    assert chosen["devices"] * chosen["num_nodes"] == 16


@pytest.mark.parametrize(
    ("total", "batch", "world", "fitting"),
    [
        (128, 4, 64, "data.batch_size=2 or global_batch=256"),
        (100, 4, 8, "global_batch=96 or 128$"),
        (12, 8, 1, "data.batch_size=6 or global_batch=8 or 16"),
        (1, 4, 2, "global_batch=8$"),
    ],
)
def test_a_remainder_is_refused_with_values_that_fit(total: int, batch: int, world: int, fitting: str):
    with pytest.raises(ConfigError, match=f"^global_batch .*got {total}; .*{fitting}"):
        trainers.batches_a_step({"global_batch": total, "data": {"batch_size": batch}}, world)


@pytest.mark.parametrize("total", ["many", 1.5, None, True, 0, -4])
def test_what_is_no_number_of_sequences_is_refused(total: Any):
    with pytest.raises(ConfigError, match="global_batch"):
        trainers.batches_a_step({"global_batch": total, "data": {"batch_size": 1}}, 1)


def test_a_pass_ends_with_a_step():
    """Six batches a pass made steps of 4, 2, 4, 2, ... batches, and fewer tokens than the header said."""
    for limit in ("6", "0.5"):
        with pytest.raises(ConfigError, match=f"^trainer.limit_train_batches .* 4,.*got {limit}"):
            trainers.refuse_early(
                config("data.batch_size=2", "global_batch=8", f"+trainer.limit_train_batches={limit}")
            )
    for fitting in ("data.batch_size=2", "+trainer.limit_train_batches=8", "+trainer.limit_train_batches=1.0"):
        trainers.refuse_early(config("data.batch_size=2", "global_batch=8", fitting))


def test_the_last_run_is_refused_before_the_first_one_trains(tmp_path: Path):
    words = ["experiment=paper_cot", "size=nano", "arms=null", "seeds=null", "trainer=ddp", "trainer.accelerator=cpu"]
    words += ["trainer.devices=3", f"logs={tmp_path}"]
    words += ["recipe.global_batch=12", "recipe.extension.global_batch=3"]
    with pytest.raises(ConfigError, match="run tune: global_batch .*got 8; .*global_batch=6 or 9$"):
        Experiment(compose(words), words).trials()


def test_an_arm_is_refused_before_another_one_trains(tmp_path: Path):
    words = ["arms={a: [], b: ['global_batch=6']}", f"logs={tmp_path}"]
    with pytest.raises(ConfigError, match="^arm b: global_batch .*got 6"):
        Experiment(compose(words), words).trials()


def test_a_run_is_refused_before_it_reads_or_writes_anything(tmp_path: Path):
    given = compose([*TINY, f"data.path={tmp_path / 'nowhere'}", f"logs={tmp_path / 'logs'}", "global_batch=6"])
    with pytest.raises(ConfigError, match="^global_batch .*got 6; .*data.batch_size=3 or global_batch=4 or 8$"):
        fit.train(given)
    assert not (tmp_path / "logs").exists()


def test_steps_are_validated_whole(home: Path):
    """The interval is in steps; Lightning counts batches, and validated in the middle of a step."""
    run = assemble(compose(arguments(home, "whole_steps", "trainer.val_check_interval=7")))
    assert (run.trainer.accumulate_grad_batches, run.trainer.val_check_interval) == (2, 14)
