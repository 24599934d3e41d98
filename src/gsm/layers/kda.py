"""KDA, Kimi Delta Attention (Kimi Team, 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture"): the
delta rule on a state with a separate decay for every key channel."""

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
    ``alpha_t = exp(-exp(a) softplus(W_2 W_1 x_t + b))``, one number per channel; ``a`` is one number per head. The
    normed output is multiplied by ``sigmoid(W_2' W_1' x_t)``. The rank of both maps is the number of channels of a
    head.

    Args:
        shape: widths that all attention layers share.
        geometry: unused.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        convolution: width in tokens of the short convolution; 1: no convolution.
        largest_beta: as in ``DeltaNet``.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, convolution: int, largest_beta: float):
        super().__init__(shape, geometry=geometry, name=name, convolution=convolution, largest_beta=largest_beta)
        inner, self.decays = shape.heads * shape.entry_dim, shape.entry_dim
        self.decay = low_rank(shape.dim, shape.entry_dim, inner)
        self.decay_rate = nn.Parameter(fresh_rates(shape.heads))
        self.decay_bias = nn.Parameter(fresh_steps(inner))
        self.gate = low_rank(shape.dim, shape.entry_dim, inner)

    def channel_decay(self, x_BTD: Tensor) -> Tensor:
        """Return log alpha, in at least float32."""
        step_BTC = F.softplus(promoted(self.decay(x_BTD)) + promoted(self.decay_bias))
        return -promoted(self.decay_rate).exp()[:, None] * self.split(step_BTC)

    def gated(self, out_BRHC: Tensor, x_BRD: Tensor) -> Tensor:
        """Multiply the output by the sigmoid of the gate."""
        return out_BRHC * self.split(self.gate(x_BRD)).sigmoid()


def low_rank(dim_in: int, rank: int, dim_out: int) -> nn.Sequential:
    """Return a linear map of rank ``rank``."""
    return nn.Sequential(Linear(dim_in, rank), Linear(rank, dim_out))
