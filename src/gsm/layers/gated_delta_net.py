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

# Ranges of the initial rate and step of a head, as in Mamba-2 (Dao and Gu, 2024); the step is uniform in the logarithm.
RATE = (1.0, 16.0)
STEP = (0.001, 0.1)


class GatedDeltaNet(DeltaNet):
    """``S_t = alpha_t S_(t-1) + beta_t k_t (v_t - alpha_t S_(t-1)^T k_t)^T`` with
    ``alpha_t = exp(-exp(A) softplus(W x_t + b))``, one number per head. The normed output is multiplied by
    ``silu(W' x_t)``.

    Args:
        shape: widths that all attention layers share.
        geometry: unused.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        convolution: width in tokens of the short convolution; 1: no convolution.
        largest_beta: as in ``DeltaNet``.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, convolution: int, largest_beta: float):
        super().__init__(shape, geometry=geometry, name=name, convolution=convolution, largest_beta=largest_beta)
        step_H = fresh_steps(shape.heads)  # drawn before the matrices, so that a seed keeps giving the same weights
        self.decay = Linear(shape.dim, shape.heads)
        self.decay_rate = nn.Parameter(fresh_rates(shape.heads))
        self.decay_bias = nn.Parameter(step_H)
        self.gate = Linear(shape.dim, shape.heads * shape.entry_dim)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """Return log alpha, in at least float32."""
        step_BTH = F.softplus(promoted(self.decay(x_BTD)) + promoted(self.decay_bias))
        return -promoted(self.decay_rate).exp() * step_BTH

    def gated(self, out_BRHC: Tensor, x_BRD: Tensor) -> Tensor:
        """Multiply the output by SiLU of the gate."""
        return out_BRHC * F.silu(self.gate(x_BRD)).unflatten(-1, (self.heads, -1))


def fresh_rates(number: int) -> Tensor:
    """Draw the logarithms of the initial decay rates of ``number`` heads."""
    return torch.empty(number).uniform_(*RATE).log()


def fresh_steps(number: int) -> Tensor:
    """Draw the initial biases b of ``number`` heads: softplus(b) is a step in the range ``STEP``."""
    low, high = (math.log(step) for step in STEP)
    step_N = torch.empty(number).uniform_(low, high).exp()
    return step_N + torch.log(-torch.expm1(-step_N))
