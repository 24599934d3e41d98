"""The clamped SwiGLU product on a CPU by compiled loops, which read their inputs once and keep nothing but them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import in_dtype
from ..native import loops, run, unfit, watched, wide

LEAST = 1 << 13  # numbers that are worth a thread


def refuses(gate: Tensor, up: Tensor, limit: float) -> str | None:
    """Why this call is not for the loops."""
    return unfit(gate, up)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See `gsm_kernels.swiglu`."""
    learning = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    return (_forward if learning or watched() else _product)(gate, up, limit)


def _product(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    given = wide(gate)
    out = torch.empty_like(given)
    run(loops(__package__).forward, out.numel(), limit, given, wide(up), out, least=LEAST)
    return in_dtype(out, gate.dtype)


@torch.library.custom_op("gsm_kernels::swiglu_cpu", mutates_args=(), device_types="cpu")
def _forward(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return _product(gate, up, limit)


@torch.library.custom_op("gsm_kernels::swiglu_cpu_backward", mutates_args=(), device_types="cpu")
def _backward(grad: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    given = [wide(x) for x in (grad, gate, up)]
    gate_grad, up_grad = torch.empty_like(given[1]), torch.empty_like(given[2])
    run(loops(__package__).backward, gate_grad.numel(), limit, *given, gate_grad, up_grad, least=LEAST)
    return in_dtype(gate_grad, gate.dtype), in_dtype(up_grad, up.dtype)


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
