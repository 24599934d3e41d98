"""What a block does with each row on its own: SwiGLU with clamped branches, the dense feed-forward of all models
(DeepSeek-V4.1), and what any feed-forward gives back.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from gsm.costs.primitives import ProductCost, products
from gsm.layers.linear import INTO_RESIDUAL, Linear
from gsm_kernels import swiglu


class Balance(NamedTuple):
    """How evenly the rows of each sequence were sent to experts, in training.

    Attributes:
        sent_BE: rows that were sent to each expert, in at least float32.
        share_BE: the sum of their scores for it, those of a row divided by their sum; differentiable.
        rows_B: how many rows there are.
        chosen: experts that a row is sent to (K).
        weight: of the loss.
    """

    sent_BE: Tensor
    share_BE: Tensor
    rows_B: Tensor
    chosen: int
    weight: float

    @property
    def loss(self) -> Tensor:
        """What makes it more even: the mean over sequences of ``sum_e (E / K) sent_e share_e / rows^2``, weighted."""
        fraction_BE = self.sent_BE * (self.sent_BE.shape[-1] / self.chosen)
        uneven_B = (fraction_BE * self.share_BE).sum(-1) / self.rows_B.clamp(min=1) ** 2
        return self.weight * uneven_B.sum() / (self.rows_B > 0).sum().clamp(min=1)

    @property
    def load_E(self) -> Tensor:
        """int64, rows of all sequences that were sent to each expert."""
        return self.sent_BE.detach().sum(0).long()


class Fed(NamedTuple):
    """What a feed-forward gives back.

    Attributes:
        update_BRD: its output.
        balance: of its experts, in training (None: it has none, or this is not training).
    """

    update_BRD: Tensor
    balance: Balance | None = None


class FeedForward(Protocol):
    """What a block needs of a feed-forward."""

    def __call__(self, x_BRD: Tensor, position_BR: Tensor) -> Fed:
        """Maps every row; positions tell padding (-1) from what counts."""
        ...

    def products(self) -> ProductCost:
        """What a row costs in products with weights."""
        ...


class SwiGLU(nn.Module):
    """``down( silu(min(gate(x), limit)) * clip(up(x), -limit, limit) )``; the product in at least float32.

    Args:
        dim: model width.
        hidden_dim: width between the two maps.
        limit: the gate is clamped from above, the other branch on both sides.
    """

    def __init__(self, dim: int, hidden_dim: int, *, limit: float = 10.0):
        super().__init__()
        self.limit = limit
        self.gate = Linear(dim, hidden_dim)
        self.up = Linear(dim, hidden_dim)
        self.down = Linear(hidden_dim, dim, gain=INTO_RESIDUAL)

    def forward(self, x: Tensor, position_BR: Tensor | None = None) -> Fed:
        """Maps [..., dim] to [..., dim], whatever the positions."""
        return Fed(self.down(swiglu(self.gate(x), self.up(x), self.limit)))

    def products(self) -> ProductCost:
        """What it costs."""
        return products(self)
