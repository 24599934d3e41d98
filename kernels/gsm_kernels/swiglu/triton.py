"""The clamped SwiGLU product in Triton: one kernel forward and one backward. Only the inputs are saved for backward.

Each element is read or written once: three tensors forward and five backward. Memory bandwidth limits the speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, launch, unfit
from ..register import register

BLOCK, WARPS = 2048, 4  # 16 elements per thread, so that enough loads are in flight to use the full bandwidth


def refuses(gate: Tensor, up: Tensor, limit: float) -> str | None:
    """Return why the kernels cannot take this call, or None."""
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
