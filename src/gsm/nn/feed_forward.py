"""SwiGLU with clamped branches, the dense feed-forward of all models (DeepSeek-V4.1)."""

from __future__ import annotations

from torch import Tensor, nn

from gsm.nn.linear import INTO_RESIDUAL, Linear
from gsm.nn.work import Products, products
from gsm_kernels import swiglu


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

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., dim] to [..., dim]."""
        return self.down(swiglu(self.gate(x), self.up(x), self.limit))

    def products(self) -> Products:
        """What it costs."""
        return products(self)
