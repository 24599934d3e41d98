"""The inputs of `mhc_boundary`, and their check."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..shapes import agree, require

LEARNED = ("streams_BRXD", "update_BRD", "phi", "bias", "scale")  # inputs with a gradient


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.mhc_boundary`, documented there."""

    streams_BRXD: Tensor
    update_BRD: Tensor
    phi: Tensor
    bias: Tensor
    scale: Tensor
    rounds: int = 20
    eps: float = 1e-6
    hc_eps: float = 1e-6


def check(inputs: Inputs) -> None:
    """Check the inputs.

    Raises:
        ValueError: if a letter has two sizes, phi, bias or scale has a wrong shape, or rounds < 1.
    """
    sizes = agree("mhc_boundary", inputs)
    streams, width = sizes["X"], sizes["D"]
    numbers = 2 * streams + streams * streams
    shapes = [tuple(x.shape) for x in (inputs.phi, inputs.bias, inputs.scale)]
    wanted = [(numbers, streams * width), (numbers,), (3,)]
    message = f"phi, bias and scale must have shapes {wanted} for {streams} streams, got {shapes}"
    require("mhc_boundary", shapes == wanted, message)
    require("mhc_boundary", inputs.rounds >= 1, f"rounds must be at least 1, got {inputs.rounds}")
