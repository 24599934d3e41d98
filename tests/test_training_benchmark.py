"""`benchmark=training`: recomputation for all alike, the baseline beside each, several devices through Lightning."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from hydra.utils import get_method
from omegaconf import OmegaConf
from torch.multiprocessing.spawn import ProcessRaisedException

from gsm.config.load import build_model
from gsm.costs.model import cost
from gsm.paths import ROOT
from gsm_benchmarks import timing, training
from gsm_benchmarks.entries import Model
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
    assert "paper: tokens/s" in output.with_suffix(".md").read_text()


def test_recomputation_reaches_every_model():
    for name in ("gsm", "transformer", "gated_delta_net"):
        job = training.Job(Model(name), "pico", True, 1, 24, 0, 1, "cpu", 1)
        with torch.device("meta"):
            model = job.build()
        stacks = [getattr(model, part, None) for part in ("encoder", "decoder")]
        assert all(stack.recompute for stack in stacks if stack is not None) and stacks[1] is not None


def test_several_devices_are_not_compiled():
    with pytest.raises(ValueError, match="devices is 2 and compile is true"):
        training.run(**QUICK, devices=2, compile=True)


@pytest.mark.slow
def test_two_processes_train_together(tmp_path):
    output = tmp_path / "a.json"
    training.run(**{**QUICK, "warm_up": 1, "steps": 2}, models=["gsm"], devices=2, output=str(output))
    row = read(output)["rows"]["gsm pico, 1 x 24, 2 devices"]
    assert row["ms"]["laps"] == 2 and row["peak_gib"] > 0
    assert row["tokens_per_second"] == pytest.approx(2 * 24e3 / row["ms"]["median"])


def test_what_does_not_fit_is_a_row_that_says_what_to_try(tmp_path, monkeypatch):
    def broken(*_):
        raise error

    asked: dict[str, Any] = {**QUICK, "models": ["gsm"], "output": str(tmp_path / "a.json")}
    monkeypatch.setattr(training, "_alone", broken)
    monkeypatch.setattr(training, "_together", broken)
    error: Exception = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    training.run(**{**asked, "batch_size": 4})
    error = ProcessRaisedException("torch.OutOfMemoryError: CUDA", 0, 1)
    training.run(**asked, devices=2, recompute=True)
    assert [row["failed"] for row in read(tmp_path / "a.json")["rows"].values()] == [
        "out of memory with 4 x 24 tokens on a device; try batch_size=2 or recompute=true",
        "out of memory with 1 x 24 tokens on a device; try context=12",
    ]
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1"):
        training.run(**asked)


def test_what_was_timed_in_another_way_or_failed_is_measured_again(tmp_path, monkeypatch):
    seen, answers = [], iter([{"failed": "out of memory"}, {}, {}, {}])

    def fake(job, *_):
        seen.append((job.warm_up, job.steps))
        return {"compiled": False, **next(answers)}

    monkeypatch.setattr(training, "measure", fake)
    monkeypatch.setattr(training, "_show", lambda path: path)
    for warm_up, steps in ((0, 1), (0, 1), (0, 1), (1, 1), (1, 2)):
        asked = {**QUICK, "warm_up": warm_up, "steps": steps}
        training.run(**asked, models=["gsm"], output=str(tmp_path / "a.json"))
    assert seen == [(0, 1), (0, 1), (1, 1), (1, 2)]


def test_an_interruption_leaves_the_table_of_what_there_is(tmp_path, monkeypatch):
    def broken(job, *_):
        if job.of.name == "baseline":
            raise KeyboardInterrupt
        return {"model": job.of.name, "compiled": False, "failed": "out of memory"}

    monkeypatch.setattr(training, "measure", broken)
    with pytest.raises(KeyboardInterrupt):
        training.run(**QUICK, models=["gsm", "baseline"], output=str(tmp_path / "a.json"))
    assert "| gsm pico, 1 x 24 | failed: out of memory |" in (tmp_path / "a.md").read_text()


def test_a_peak_that_is_not_known_is_in_no_ratio():
    row = {"model": "gsm", "ms": {"median": 2.0}, "tokens_per_second": 3.0, "peak_gib": None}
    text = training.paper_table({"device": "a CPU", "rows": {"a": row, "b": {**row, "model": "baseline"}}})
    assert "| a: tokens/s |" in text and "| a: s a step |" in text and "| a: peak" not in text


def test_one_device_takes_the_step_that_the_trainer_takes(monkeypatch):
    """Indexers clipped on their own, documents given, experts rebalanced."""
    model = build_model("gsm", "pico", ["model/feed_forward=moe"], seed=0)
    job = training.Job(Model("gsm"), "pico", False, 1, 24, 0, 1, "cpu", 1)
    given, clipped, forward, clip = [], [], model.forward, torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(model, "forward", lambda *args, **named: given.append(named) or forward(*args, **named))
    monkeypatch.setattr(
        torch.nn.utils, "clip_grads_with_norm_", lambda some, *to: clipped.append(len(some)) or clip(some, *to)
    )
    loads = []
    monkeypatch.setattr(model, "rebalance", loads.append)
    training._step(model, job, torch.device("cpu"))()
    assert given[0]["documents"].eq(0).all() and len(clipped) == 2 and len(loads) == 1


@pytest.mark.parametrize("path", sorted((ROOT / "configs/benchmark").glob("*.yaml")), ids=lambda path: path.stem)
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
