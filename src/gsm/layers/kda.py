"""KDA, Kimi Delta Attention (Kimi Team, 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture"): the
delta rule on a state of which every key channel decays at a rate of its own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gsm.layers.delta_net import DeltaNet
from gsm.layers.gated_delta_net import fresh_rates, fresh_steps
from gsm.layers.linear import Linear
from gsm.layers.projections import Shape
from gsm.shapes import promoted


class KDA(DeltaNet):
    """``S_t = A_t S_(t-1) + beta_t k_t (v_t - S_(t-1)^T A_t k_t)^T`` with ``A_t = diag(alpha_t)`` and
    ``alpha_t = exp(-exp(a) softplus(W_2 W_1 x_t + b))``, a number for every channel, ``a`` for every head; the normed
    output passes ``sigmoid(W_2' W_1' x_t)``. Both maps go through as many numbers as a head has channels.

    Args:
        shape: shared widths.
        geometry: not needed.
        name: what its taps are called.
        convolution: tokens that the short convolution sees; 1: there is none.
        largest_beta: as in ``DeltaNet``.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, convolution: int, largest_beta: float):
        super().__init__(shape, geometry=geometry, name=name, convolution=convolution, largest_beta=largest_beta)
        inner, self.decays = shape.heads * shape.entry_dim, shape.entry_dim
        self.decay = through(shape.dim, shape.entry_dim, inner)
        self.decay_rate = nn.Parameter(fresh_rates(shape.heads))
        self.decay_bias = nn.Parameter(fresh_steps(inner))
        self.gate = through(shape.dim, shape.entry_dim, inner)

    def channel_decay(self, x_BTD: Tensor) -> Tensor:
        """log alpha, in at least float32."""
        step_BTC = F.softplus(promoted(self.decay(x_BTD)) + promoted(self.decay_bias))
        return -promoted(self.decay_rate).exp()[:, None] * self.split(step_BTC)

    def gated(self, out_BRHC: Tensor, x_BRD: Tensor) -> Tensor:
        """The output times the sigmoid of the gate."""
        return out_BRHC * self.split(self.gate(x_BRD)).sigmoid()

    def for_rows(self) -> tuple[nn.Module, ...]:
        """The gate as well."""
        return *super().for_rows(), self.gate


def through(dim_in: int, rank: int, dim_out: int) -> nn.Sequential:
    """A linear map of such a rank."""
    return nn.Sequential(Linear(dim_in, rank), Linear(rank, dim_out))
