"""DeltaNet (Yang et al., 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"): a token
replaces what the state answers to its key, instead of adding to it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gsm.layers.linear import Linear
from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence
from gsm.shapes import promoted


class DeltaNet(Recurrence):
    """``S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T``; query and key are SiLU, then of unit length; the value is
    SiLU.

    Args:
        shape: shared widths.
        geometry: not needed.
        name: what its taps are called.
        convolution: tokens that the short convolution sees; 1: there is none.
        largest_beta: beta is so many times a sigmoid. 1 is the paper's; with 2 a write may turn the state around along
            its key, an eigenvalue down to -1, with which it can keep track of a parity (Grazzi et al., 2024).
        steps: writes of a token; with several it is DeltaProduct.

    Raises:
        ValueError: for a largest_beta outside of (0, 2], where the state would grow without bound.
    """

    corrects = True

    def __init__(
        self,
        shape: Shape,
        *,
        geometry: object,
        name: str,
        convolution: int,
        largest_beta: float,
        steps: int = 1,
    ):
        super().__init__(shape, name=name, convolution=convolution, steps=steps)
        if not 0 < largest_beta <= 2:
            raise ValueError(
                f"largest_beta must lie above 0 and be at most 2, or the state explodes; got {largest_beta}"
            )
        self.largest_beta = largest_beta
        self.beta = Linear(shape.dim, steps * shape.heads)

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """SiLU, then unit length."""
        return F.normalize(F.silu(promoted(x_BTHC)), dim=-1, eps=1e-6).to(x_BTHC.dtype)

    def activate(self, value_BTC: Tensor) -> Tensor:
        """SiLU."""
        return F.silu(value_BTC)

    def strength(self, x_BTD: Tensor) -> Tensor:
        """beta; where a token writes several times, these are as many tokens in a row."""
        beta_BTH = self.largest_beta * self.beta(x_BTD).sigmoid()
        return beta_BTH.unflatten(-1, (self.steps, self.heads)).flatten(1, 2)
