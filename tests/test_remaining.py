"""The time left of a run, after twenty steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gsm.training.callbacks import progress
from gsm.training.callbacks.progress import Progress


def test_a_run_shows_its_time_left_after_twenty_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 2.0 * trainer.global_step)
    trainer: Any = SimpleNamespace(global_step=5, max_steps=100, callback_metrics={"train/loss": torch.tensor(1.0)})
    shown = Progress()
    shown.on_train_start(trainer, trainer)
    for step, end in ((24, "loss 1.000"), (25, "2:30 left"), (100, "loss 1.000")):
        trainer.global_step = step
        assert shown._line(trainer).endswith(end)
