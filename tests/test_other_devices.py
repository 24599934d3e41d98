"""Devices that nobody here has: refused with a sentence, or left alone; never half right."""

from __future__ import annotations

import pytest
import torch
from short_runs import SIZES
from small import build

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import usable
from gsm.models import checks
from gsm.training import trainer as trainers


def test_auto_is_the_cpu_where_there_is_no_gpu_also_on_a_mac(monkeypatch: pytest.MonkeyPatch):
    """Lightning takes MPS for auto wherever it is available."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert trainers.trainer_arguments(compose(SIZES))["accelerator"] == "cpu"


@pytest.mark.parametrize("device", ["mps", "mps:0", "xpu"])
def test_another_device_of_a_command_is_refused(device: str):
    with pytest.raises(ConfigError, match=f"^device .*{device}"):
        usable(device)


def test_a_model_refuses_tokens_on_another_device(monkeypatch: pytest.MonkeyPatch):
    """The CPU plays the untried device."""
    model = build("gsm")
    monkeypatch.setattr(checks, "DEVICES", ("cuda",))
    with pytest.raises(ValueError, match="^tokens .*cpu"):
        model(torch.zeros(1, 3, dtype=torch.int64))
