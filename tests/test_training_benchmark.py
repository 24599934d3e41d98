"""`benchmark=training`: recomputation for all alike, the baseline beside each."""

from __future__ import annotations

import contextlib
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_method
from omegaconf import OmegaConf
from ranks import together

from gsm.config.load import build_model
from gsm.costs.model import cost
from gsm.evaluation.divided import join
from gsm.paths import ROOT
from gsm_benchmarks import timing, training
from gsm_benchmarks.models import Model
from gsm_benchmarks.results import read

QUICK = {"device": "cpu", "size": "pico", "batch_size": 1, "context": 24, "warm_up": 0, "steps": 1}

JOB = training.Job(Model("gsm", "gsm"), "pico", False, 1, 24, 0, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings are measured."""
    monkeypatch.setattr(timing, "ceilings", lambda device: timing.Ceilings(1e12, 1e11, "float32"))


@pytest.mark.slow
def test_recomputation_is_the_same_for_all_and_no_work(tmp_path):
    output = tmp_path / "a.json"
    training.run(**QUICK, models=["gsm", "baseline"], recompute=True, output=str(output))
    rows = read(output)["rows"]
    assert list(rows) == ["gsm pico, 1 x 24, recomputed", "baseline pico, 1 x 24, recomputed"]
    for row in rows.values():
        assert row["flops"] == cost(build_model(row["model"], "pico")).training_flops(24).total()
    speeds = [row["tokens_per_second"] for row in rows.values()]
    assert f"| {speeds[0] / speeds[1]:.3f} |" in output.with_suffix(".md").read_text()
    assert all(row["peak_gib"] is None for row in rows.values())  # in one process they would not be comparable


def measured(folder: Path) -> None:
    """In one process of several: a step of the job alone, then the benchmark."""
    timing.ceilings = lambda device: timing.Ceilings(1e12, 1e11, "float32")
    ranks = join()
    job = replace(JOB, ranks=ranks)
    model = job.build()
    training.step_of(model, job, torch.device("cpu"), half=False)()
    torch.save(model.state_dict(), folder / f"{ranks.rank}.pt")
    with (folder / f"printed-{ranks.rank}").open("w") as output, contextlib.redirect_stdout(output):
        training.run(**QUICK, models=["gsm"], output=str(folder / "a.json"))


def test_devices_train_together_and_one_of_them_writes(processes: Any, tmp_path: Path):
    assert together(processes, 2, measured, tmp_path) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    model = JOB.build()
    training.step_of(model, JOB, torch.device("cpu"), half=False)()
    assert all(torch.equal(first[name], second[name]) for name in first), "one gradient, of other tokens on each"
    assert not all(torch.equal(first[name], alone) for name, alone in model.state_dict().items())
    ((name, row),) = read(tmp_path / "a.json")["rows"].items()
    assert name == "gsm pico, 1 x 24, on 2 devices" and row["devices"] == 2
    assert row["tokens_per_second"] == pytest.approx(2 * 24e3 / row["ms"]["median"])
    assert name in (tmp_path / "printed-0").read_text() and not (tmp_path / "printed-1").read_text()


def test_recomputation_reaches_every_model():
    for name in ("gsm", "transformer", "gated_delta_net"):
        job = training.Job(Model(name, name), "pico", True, 1, 24, 0, 1)
        with torch.device("meta"):
            model = job.build()
        stacks = [getattr(model, part, None) for part in ("encoder", "decoder")]
        assert all(stack.recompute for stack in stacks if stack is not None) and stacks[1] is not None


def test_a_step_is_that_of_the_trainer(monkeypatch):
    """Indexers clipped on their own, documents given, experts rebalanced."""
    model = build_model("gsm", "pico", ["model/feed_forward=moe"], seed=0)
    job = training.Job(Model("gsm", "gsm"), "pico", False, 1, 24, 0, 1)
    given, clipped, forward, clip = [], [], model.forward, torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(model, "forward", lambda *args, **named: given.append(named) or forward(*args, **named))
    monkeypatch.setattr(
        torch.nn.utils, "clip_grads_with_norm_", lambda some, *to: clipped.append(len(some)) or clip(some, *to)
    )
    loads = []
    monkeypatch.setattr(model, "rebalance", loads.append)
    training.step_of(model, job, torch.device("cpu"), half=False)()
    assert given[0]["documents"].eq(0).all() and len(clipped) == 2 and len(loads) == 1


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "configs/benchmark").glob("*.yaml")) if "_target_" in path.read_text()],
    ids=lambda path: path.stem,
)
def test_a_function_s_defaults_are_those_of_its_yaml(path):
    config = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(config, dict)
    taken = inspect.signature(get_method(str(config.pop("_target_")))).parameters
    stated = {name: value for name, value in config.items() if "${" not in str(value)}
    given = {
        name: taken[str(name)].default for name in stated if taken[str(name)].default is not inspect.Parameter.empty
    }
    assert given, "what a yaml has to say has no default; the rest does"
    assert json.loads(json.dumps(given)) == {name: stated[name] for name in given}
