"""DeltaNet (Yang et al., 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"): a token
replaces the value stored for its key, instead of adding to it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gsm.layers.linear import Linear
from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence
from gsm.shapes import promoted


class DeltaNet(Recurrence):
    """``S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T``, ``out_t = norm(S_t^T q_t)``. SiLU is applied to queries,
    keys and values; queries and keys are then normalised to unit length.

    Args:
        shape: widths that all attention layers share.
        geometry: unused.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        convolution: width in tokens of the short convolution; 1: no convolution.
        largest_beta: factor of the sigmoid in beta; 1 in the paper. With 2, a write can reverse the state along its key
            (an eigenvalue down to -1), so that the state can track a parity (Grazzi et al., 2024).
        steps: writes per token; more than one in ``DeltaProduct``.

    Raises:
        ValueError: if ``largest_beta`` is not in (0, 2]; above 2, the state grows without bound.
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
            raise ValueError(f"largest_beta must be in (0, 2], so that the state stays bounded, got {largest_beta}")
        self.largest_beta = largest_beta
        self.beta = Linear(shape.dim, steps * shape.heads)

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """Apply SiLU, then normalise to unit length."""
        return F.normalize(F.silu(promoted(x_BTHC)), dim=-1, eps=1e-6).to(x_BTHC.dtype)

    def activate(self, value_BTC: Tensor) -> Tensor:
        """Apply SiLU."""
        return F.silu(value_BTC)

    def strength(self, x_BTD: Tensor) -> Tensor:
        """Return beta of every write, [B, T * steps, H]: the writes of a token are consecutive."""
        beta_BTH = self.largest_beta * self.beta(x_BTD).sigmoid()
        return beta_BTH.unflatten(-1, (self.steps, self.heads)).flatten(1, 2)
