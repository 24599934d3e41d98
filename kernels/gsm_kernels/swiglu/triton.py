"""The clamped SwiGLU product in one kernel forward and one backward: both read their inputs once and keep nothing but
them.

With three tensors to read or write forward and five backward, the time is that of the memory's bandwidth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, launch, unfit
from ..register import register

BLOCK, WARPS = 2048, 4  # 16 bytes a thread and access, four accesses: enough of them under way to fill the bandwidth


def refuses(gate: Tensor, up: Tensor, limit: float) -> str | None:
    """Return why this call is not for the kernels."""
    return unfit(gate, up)


def _forward(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    from .kernels import forward

    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    launch(forward, (cdiv(out.numel(), BLOCK),), gate, up, out, limit, out.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return out


def _backward(grad: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    from .kernels import backward

    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
    args = (grad, gate, up, gate_grad, up_grad, limit, gate.numel())
    launch(backward, (cdiv(gate.numel(), BLOCK),), *args, BLOCK=BLOCK, num_warps=WARPS)
    return gate_grad, up_grad


swiglu = register("swiglu", _forward, backward=_backward, learned=("gate", "up"))
