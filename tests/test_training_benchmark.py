"""`benchmark=training`: recomputation for all alike, the baseline beside each."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from hydra.utils import get_method
from omegaconf import OmegaConf

from gsm.config.load import build_model
from gsm.costs.model import cost
from gsm.paths import ROOT
from gsm_benchmarks import timing, training
from gsm_benchmarks.models import Model
from gsm_benchmarks.results import read

QUICK = {"device": "cpu", "size": "pico", "batch_size": 1, "context": 24, "warm_up": 0, "steps": 1}


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
