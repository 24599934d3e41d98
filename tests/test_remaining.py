"""The time left, of a run and of an experiment, after twenty steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gsm.experiments.remaining import Remaining
from gsm.experiments.runs import Run
from gsm.training.callbacks import progress
from gsm.training.callbacks.progress import Progress


def training(folder: Path, arm: str, steps: int = 100, **more: Any) -> Run:
    config = {"arm": arm, "folder": str(folder / arm), "trainer": {"max_steps": steps}, "start_fresh": False, **more}
    return Run(arm, folder / arm, (), config=config)


def log(run: Run, *steps: int) -> None:
    run.folder.mkdir(exist_ok=True)
    lines = [f"{step},train/loss,2.5\n" for step in steps]
    (run.folder / "metrics.csv").write_text("step,name,value\n" + "".join(lines))


def test_the_first_rate_is_that_of_all_runs_to_come(tmp_path: Path):
    first, second = training(tmp_path, "first"), training(tmp_path, "second", 50)
    evaluation = Run("loss", tmp_path, (), checkpoint=tmp_path)
    remaining = Remaining(at_once=1)
    log(first, 90)  # of an earlier run
    assert not remaining.watch(first, 0.0) and remaining.sentence([first]) == ""
    log(first, 10, 20)
    assert not remaining.watch(first, 10.0)
    log(first, 10, 20, 30)
    assert not remaining.watch(first, 20.0), "ten steps"
    log(first, 10, 20, 30, 40)
    assert remaining.watch(first, 30.0) and not remaining.watch(first, 31.0)
    assert remaining.sentence([first, second, evaluation]) == "1:50 left for 2 runs, then 1 evaluation"
    assert Remaining(2, remaining.rates).sentence([first, second]) == "1:15 left for 2 runs"


def test_each_arm_has_its_own_rate(tmp_path: Path):
    remaining = Remaining(1, {"slow": 2.0, "fast": 1.0})
    slow, fast, other = (training(tmp_path, arm, 10) for arm in ("slow", "fast", "other"))
    assert remaining.sentence([slow]) == "0:20 left for 1 run"
    assert remaining.sentence([slow, fast, other]) == "0:45 left for 3 runs"
    assert remaining.sentence([]) == ""


def test_a_run_shows_its_time_left_after_twenty_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 2.0 * trainer.global_step)
    trainer: Any = SimpleNamespace(global_step=5, max_steps=100, callback_metrics={}, callbacks=[])
    shown = Progress()
    shown.on_train_start(trainer, trainer)
    for step, end in ((24, "loss 1.000"), (25, "2:30 left"), (100, "loss 1.000")):
        trainer.global_step = step
        assert shown._line(trainer, 1.0).endswith(end)
