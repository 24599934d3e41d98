"""The arguments of `mhc_boundary`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..shapes import agree, require

LEARNED = ("streams_BRXD", "update_BRD", "phi", "bias", "scale")  # the inputs that get a gradient


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.mhc_boundary`, described there."""

    streams_BRXD: Tensor
    update_BRD: Tensor
    phi: Tensor
    bias: Tensor
    scale: Tensor
    rounds: int = 20
    eps: float = 1e-6
    hc_eps: float = 1e-6


def check(inputs: Inputs) -> None:
    """Raise ValueError, in one sentence, if B, R or D has two sizes, phi, bias or scale is not made for X streams of D
    channels, or rounds is below 1."""
    sizes = agree("mhc_boundary", inputs)
    streams, width = sizes["X"], sizes["D"]
    numbers = 2 * streams + streams * streams
    shapes = [tuple(x.shape) for x in (inputs.phi, inputs.bias, inputs.scale)]
    wanted = [(numbers, streams * width), (numbers,), (3,)]
    require("mhc_boundary", shapes == wanted, f"phi, bias, scale have shapes {shapes}; {streams} streams need {wanted}")
    require("mhc_boundary", inputs.rounds >= 1, f"rounds = {inputs.rounds} must be at least 1")
