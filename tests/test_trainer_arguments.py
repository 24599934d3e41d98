"""Every argument of Lightning's Trainer is taken by a run, or refused in one sentence that names another way."""

from __future__ import annotations

import inspect
from typing import Any

import lightning
import pytest

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.training import trainer as trainers

SIGNATURE = inspect.signature(lightning.Trainer).parameters
REFUSED = {
    "accumulate_grad_batches": 2,
    "barebones": True,
    "callbacks": [],
    "check_val_every_n_epoch": 1,
    "default_root_dir": "/elsewhere",
    "enable_autolog_hparams": False,
    "enable_checkpointing": True,
    "fast_dev_run": True,
    "gradient_clip_algorithm": "value",
    "limit_predict_batches": 2,
    "limit_test_batches": 2,
    "logger": True,
    "max_epochs": 2,
    "max_time": "00:00:01:00",
    "min_epochs": 2,
    "min_steps": 2,
    "model_registry": "mine",
    "overfit_batches": 1,
    "profiler": "simple",
    "strategy": "deepspeed",
    "sync_batchnorm": True,
}


def test_every_argument_of_the_installed_lightning_is_in_the_table():
    assert trainers.ARGUMENTS.keys() == SIGNATURE.keys()
    assert REFUSED.keys() == {name for name, refusal in trainers.ARGUMENTS.items() if refusal}


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_an_argument_that_a_run_does_not_take_is_refused(name: str, value: Any):
    """Clipping by value clipped by norm, a profiler printed nothing, and other loggers and folders were passed over."""
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}=.* is not allowed because .*\. (Use|Leave)") as error:
        trainers.refuse_arguments({"val_check_interval": 1, name: value})
    assert "\n" not in str(error.value)


def test_the_default_of_every_argument_changes_nothing():
    defaults = {name: parameter.default for name, parameter in SIGNATURE.items()}
    own = ("val_check_interval", "check_val_every_n_epoch", "accumulate_grad_batches", "max_steps")
    trainers.refuse_arguments(
        {**{name: value for name, value in defaults.items() if name not in own}, "val_check_interval": 1}
    )


def test_an_argument_of_a_newer_lightning_is_refused():
    with pytest.raises(
        ConfigError, match="trainer.quantum=1 is not allowed because this version of Lightning is newer"
    ):
        trainers.refuse_arguments({"val_check_interval": 1, "quantum": 1})


def test_a_gpu_that_is_not_there_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="trainer.accelerator=gpu is not allowed because PyTorch sees no GPU here. Use"
    ):
        trainers.settings(compose(["size=pico", "trainer.accelerator=gpu"]))
