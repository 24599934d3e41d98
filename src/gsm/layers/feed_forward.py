"""The interface and the output of feed-forwards, and SwiGLU with clamped branches, the dense feed-forward of all models
(DeepSeek-V4.1).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from gsm.layers.costs import ProductCost, products
from gsm.layers.linear import INTO_RESIDUAL, Linear, together
from gsm_kernels import swiglu


class Balance(NamedTuple):
    """The loads of the experts of a layer, per sequence, in training.

    Attributes:
        sent_BE: number of rows routed to each expert, in at least float32.
        share_BE: sum over rows of the score of each expert, with the scores of a row divided by their sum;
            differentiable.
        rows_B: number of rows.
        chosen: experts per row (K).
        weight: weight of the loss.
    """

    sent_BE: Tensor
    share_BE: Tensor
    rows_B: Tensor
    chosen: int
    weight: float

    @property
    def loss(self) -> Tensor:
        """The weighted balance loss: the mean over sequences of ``sum_e (E / K) sent_e share_e / rows^2``."""
        fraction_BE = self.sent_BE * (self.sent_BE.shape[-1] / self.chosen)
        uneven_B = (fraction_BE * self.share_BE).sum(-1) / self.rows_B.clamp(min=1) ** 2
        return self.weight * uneven_B.sum() / (self.rows_B > 0).sum().clamp(min=1)

    @property
    def load_E(self) -> Tensor:
        """Number of rows of all sequences that are routed to each expert, int64."""
        return self.sent_BE.detach().sum(0).long()


class Fed(NamedTuple):
    """The output of a feed-forward.

    Attributes:
        update_BRD: the output of each row.
        balance: the loads of its experts (None: no experts, or not in training).
    """

    update_BRD: Tensor
    balance: Balance | None = None


class FeedForward(Protocol):
    """The interface of a feed-forward."""

    def __call__(self, x_BRD: Tensor, position_BR: Tensor) -> Fed:
        """Map every row; ``position_BR`` is -1 for padding."""
        ...

    def products(self) -> ProductCost:
        """Return the cost per row of products with weights."""
        ...


class SwiGLU(nn.Module):
    """``down( silu(min(gate(x), limit)) * clip(up(x), -limit, limit) )``; the product is in at least float32.

    Args:
        dim: model width (D).
        hidden_dim: hidden width.
        limit: upper bound of ``gate(x)``, and bound of the magnitude of ``up(x)``.
    """

    def __init__(self, dim: int, hidden_dim: int, *, limit: float = 10.0):
        super().__init__()
        self.limit = limit
        self.gate = Linear(dim, hidden_dim)
        self.up = Linear(dim, hidden_dim)
        self.down = Linear(hidden_dim, dim, gain=INTO_RESIDUAL)

    def forward(self, x: Tensor, position_BR: Tensor | None = None) -> Fed:
        """Map [..., dim] to [..., dim]; positions are ignored."""
        return Fed(self.down(swiglu(*together(x, *self.one_input), self.limit)))

    @property
    def one_input(self) -> tuple[Linear, Linear]:
        """The maps of the same input."""
        return self.gate, self.up

    def products(self) -> ProductCost:
        """Return the cost per row."""
        return products(self)
