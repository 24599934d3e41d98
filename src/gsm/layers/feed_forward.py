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
    """How evenly rows were sent to experts, in training.

    Attributes:
        loss: what makes it more even, weighted already.
        load_E: int64, rows sent to each expert.
    """

    loss: Tensor
    load_E: Tensor


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
