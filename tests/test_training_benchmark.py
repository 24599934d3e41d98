"""`benchmark=training`: recomputation for all alike, the baseline beside each, several devices through Lightning."""

from __future__ import annotations

import pytest
import torch

from gsm.benchmarks import distributed, training
from gsm.models.cost import cost
from gsm.runs.load import build_model
from gsm_kernels.benchmark import ceilings
from gsm_kernels.benchmark.results import read

QUICK = {"device": "cpu", "size": "pico", "batch_size": 1, "context": 24, "warm_up": 0, "steps": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings are measured."""
    monkeypatch.setattr(ceilings, "measure", lambda device: ceilings.Ceilings(1e12, 1e11, "float32"))


def test_recomputation_is_the_same_for_all_and_no_work(tmp_path):
    output = tmp_path / "a.json"
    training.run(**QUICK, models=["gsm", "baseline"], recompute=True, output=str(output))
    rows = read(output)["rows"]
    assert list(rows) == ["gsm pico, 1 x 24, recomputed", "baseline pico, 1 x 24, recomputed"]
    for row in rows.values():
        assert row["flops"] == cost(build_model(row["model"], "pico")).training_flops(24).total()
    speeds = [row["tokens_per_second"] for row in rows.values()]
    assert f"| {speeds[0] / speeds[1]:.3f} |" in output.with_suffix(".md").read_text()
    assert "paper: tokens/s" in output.with_suffix(".md").read_text()


def test_recomputation_reaches_every_model():
    for name in ("gsm", "baseline", "transformer", "yoco", "gated_delta_net"):
        job = distributed.Job(name, "pico", True, 1, 24, 0, 1, "cpu", 1)
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
