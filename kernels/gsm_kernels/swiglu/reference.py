"""Plain PyTorch product of a clamped SwiGLU, with a hand-written backward that keeps its two inputs and nothing
else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import at_least_float32, full_precision, handed_out, once


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See `gsm_kernels.swiglu`."""
    return _SwiGLU.apply(gate, up, limit)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, limit):
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        capped, clipped = _clamped(gate, up, limit)
        return handed_out(F.silu(capped).mul_(clipped), gate.dtype)

    @staticmethod
    @once
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        with full_precision(grad):
            capped, clipped = _clamped(gate, up, ctx.limit)
            wide = grad.to(capped.dtype)
            gate_grad = torch.ops.aten.silu_backward(wide * clipped, capped).masked_fill_(gate > ctx.limit, 0)
            up_grad = F.silu(capped).mul_(wide).masked_fill_(up.abs() > ctx.limit, 0)
        return gate_grad.to(gate.dtype), up_grad.to(up.dtype), None


def _clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return at_least_float32(gate).clamp(max=limit), at_least_float32(up).clamp(-limit, limit)
