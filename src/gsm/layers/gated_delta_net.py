"""Gated DeltaNet (Yang et al., 2024b, "Gated Delta Networks: Improving Mamba2 with Delta Rule"): the delta rule on a
state that decays."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.layers.delta_net import DeltaNet
from gsm.layers.linear import Linear
from gsm.layers.projections import Shape
from gsm.shapes import promoted

# Where a fresh head starts, drawn as Mamba-2 does (Dao and Gu, 2024): its rate, and its step, uniform in the logarithm.
RATE = (1.0, 16.0)
STEP = (0.001, 0.1)


class GatedDeltaNet(DeltaNet):
    """``S_t = alpha_t S_(t-1) + beta_t k_t (v_t - alpha_t S_(t-1)^T k_t)^T`` with
    ``alpha_t = exp(-exp(A) softplus(W x_t + b))``, one number for a head; the normed output passes ``silu(W' x_t)``.

    Args:
        shape: shared widths.
        geometry: not needed.
        name: what its taps are called.
        convolution: tokens that the short convolution sees; 1: there is none.
        largest_beta: as in ``DeltaNet``.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, convolution: int, largest_beta: float):
        super().__init__(shape, geometry=geometry, name=name, convolution=convolution, largest_beta=largest_beta)
        step_H = fresh_steps(shape.heads)  # drawn before the matrices: a seed stands for the weights that it always did
        self.decay = Linear(shape.dim, shape.heads)
        self.decay_rate = nn.Parameter(fresh_rates(shape.heads))
        self.decay_bias = nn.Parameter(step_H)
        self.gate = Linear(shape.dim, shape.heads * shape.entry_dim)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """log alpha, in at least float32."""
        step_BTH = F.softplus(promoted(self.decay(x_BTD)) + promoted(self.decay_bias))
        return -promoted(self.decay_rate).exp() * step_BTH

    def gated(self, out_BRHC: Tensor, x_BRD: Tensor) -> Tensor:
        """The output times SiLU of the gate."""
        return out_BRHC * F.silu(self.gate(x_BRD)).unflatten(-1, (self.heads, -1))

    def for_rows(self) -> tuple[nn.Module, ...]:
        """The gate as well."""
        return *super().for_rows(), self.gate


def fresh_rates(number: int) -> Tensor:
    """Logarithms of rates at which fresh heads decay."""
    return torch.empty(number).uniform_(*RATE).log()


def fresh_steps(number: int) -> Tensor:
    """Numbers of which softplus is a fresh step."""
    low, high = (math.log(step) for step in STEP)
    step_N = torch.empty(number).uniform_(low, high).exp()
    return step_N + torch.log(-torch.expm1(-step_N))
