"""The clamped SwiGLU product in one kernel forward and one backward: both read their inputs once and keep nothing but
them.

With three tensors to read or write forward and five backward, the time is that of the memory's bandwidth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import build_once, cdiv, launch, unfit

BLOCK, WARPS = 2048, 4  # 16 bytes a thread and access, four accesses: enough of them under way to fill the bandwidth


def refuses(gate: Tensor, up: Tensor, limit: float) -> str | None:
    """Why this call is not for the kernels."""
    return unfit(gate, up)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See `gsm_kernels.swiglu`."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        build_once(("swiglu", gate.device, gate.dtype, up.dtype), lambda: _backward(gate, gate, up, limit))
    return _forward(gate, up, limit)


@torch.library.custom_op("gsm_kernels::swiglu", mutates_args=())
def _forward(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    from .kernels import forward

    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    launch(forward, (cdiv(out.numel(), BLOCK),), gate, up, out, limit, out.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return out


@torch.library.custom_op("gsm_kernels::swiglu_backward", mutates_args=())
def _backward(grad: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    from .kernels import backward

    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
    args = (grad, gate, up, gate_grad, up_grad, limit, gate.numel())
    launch(backward, (cdiv(gate.numel(), BLOCK),), *args, BLOCK=BLOCK, num_warps=WARPS)
    return gate_grad, up_grad


@_forward.register_fake
def _(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    whole = torch.contiguous_format
    return torch.empty_like(gate, memory_format=whole), torch.empty_like(up, memory_format=whole)


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    gate, up, ctx.limit = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.limit), None


_forward.register_autograd(_gradients, setup_context=_keep)
