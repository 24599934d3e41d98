"""The baseline beside DeepSeek's own code for V4.1: numbers that it gave (`deepseek_v41.json`: inference/model.py of
DeepSeek-V4.1-Flash at dba1be0a40aa, in float64, its fake quantisation out of action), for weights that a formula
gives. Sixteen index heads keep scores from being equal, for which that code has no rule."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gsm.layers.experts import MixtureOfExperts
from gsm.models.baseline import Baseline
from gsm.models.geometry import Geometry

RECORDED = json.loads((Path(__file__).parent / "deepseek_v41.json").read_text())
GEOMETRY = Geometry(**RECORDED["geometry"])


def uniform(count: int, number: int) -> Tensor:
    """Numbers in (0, 1), float64 [count], by a hash of their place and of a number."""
    x = torch.arange(count) + 1000003 * (number + 1)
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)).double() + 0.5) / 2**32


@torch.no_grad()
def weighted(**options: Any) -> Baseline:
    """The baseline with the weights that the numbers were recorded for."""
    experts = partial(MixtureOfExperts, experts=GEOMETRY.experts, chosen=GEOMETRY.experts_per_token)
    model = Baseline(GEOMETRY, feed_forward=experts, **options).double().eval()
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        u = uniform(parameter.numel(), number).view_as(parameter)
        e = (u - 0.5) * 12**0.5
        if name.endswith("phi"):
            value = 0.3 * e
        elif name.endswith("residual.scale"):
            value = 0.3 + 0.5 * u
        elif name.endswith("residual.bias"):
            value = 0.7 * e
        elif "norm" in name:
            value = 0.6 + 0.8 * u
        else:
            value = e if name.endswith("sink") else e / parameter.shape[-1] ** 0.5
        parameter.copy_(value)
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    for number, mixture in enumerate(mixtures):  # in the order of the layers
        mixture.nudges_E.copy_((400 * uniform(GEOMETRY.experts, 1000 + number)).floor() - 200)
    return model


def test_logits_loss_and_gradients_are_those_of_deepseek_s_own_code():
    model, tokens_BT = weighted(), (61 * uniform(240, 5000)).floor().long().view(2, 120)
    assert tokens_BT[0, :10].tolist() == RECORDED["first ten tokens"]
    logits_BTV = model(tokens_BT).logits
    close = partial(pytest.approx, rel=1e-10, abs=1e-10)
    assert logits_BTV.square().sum().item() == close(RECORDED["sum of squares of all logits"])
    for place, expected in RECORDED["logits of sequence 0, first five of the vocabulary, by position"].items():
        assert logits_BTV[0, int(place), :5].tolist() == close(expected), f"position {place}"
    assert logits_BTV[1, 119, -5:].tolist() == close(RECORDED["logits of sequence 1, position 119, last five"])
    loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    assert loss.item() == close(RECORDED["loss"])
    loss.backward()
    blocks = [*model.encoder.blocks, *model.decoder.blocks]
    for place, expected in RECORDED["norm of the gradient of the loss, by layer (from 1) and parameter"].items():
        layer, name = place.split()
        gradient = blocks[int(layer) - 1].get_parameter(name).grad
        assert gradient is not None and gradient.norm().item() == close(expected), place
