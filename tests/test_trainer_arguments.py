"""Every argument of Lightning's Trainer is taken by a run, or refused in one sentence."""

from __future__ import annotations

import inspect
from typing import Any

import lightning
import pytest

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.training import trainer as trainers

SIGNATURE = inspect.signature(lightning.Trainer).parameters


def test_every_argument_that_is_taken_is_one_of_lightning():
    assert trainers.TAKEN <= SIGNATURE.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 2) for name in sorted(SIGNATURE.keys() - trainers.TAKEN)),
        ("strategy", "deepspeed"),
        ("val_check_interval", 0.5),
        ("limit_train_batches", 0),
        ("accelerator", "mps"),
    ],
)
def test_an_argument_that_a_run_does_not_take_is_refused(name: str, value: Any):
    """Clipping by value clipped by norm, a profiler printed nothing, and other loggers and folders were passed over."""
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}( is|=)") as error:
        trainers.refuse_arguments({"val_check_interval": 1, name: value})
    assert "\n" not in str(error.value)


def test_a_gpu_that_is_not_there_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="trainer.accelerator=gpu is not allowed because PyTorch sees no GPU here. Use"
    ):
        trainers.settings(compose(["size=pico", "trainer.accelerator=gpu"]))
