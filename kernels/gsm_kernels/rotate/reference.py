"""Rotation in plain PyTorch: as a complex product, or as four real ones in a compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..device import at_least_float32, handed_out, in_dtype, once


def rotate(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool = False) -> Tensor:
    """See `gsm_kernels.rotate`."""
    return differentiable(_turned, x, cos_BRP, sin_BRP, inverse)


def differentiable(turned: Callable[..., Tensor], x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool) -> Tensor:
    """Return `turned(x, cos_BRP, sin_BRP, inverse)`, differentiable in x. Backward rotates the gradient back, so that
    only the angles are saved."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotation.apply(turned, x, cos_BRP, sin_BRP, inverse)
    return turned(x, cos_BRP, sin_BRP, inverse)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, turned, x, cos_BRP, sin_BRP, inverse):
        ctx.save_for_backward(cos_BRP, sin_BRP)
        ctx.turned, ctx.inverse = turned, inverse
        return handed_out(turned(x, cos_BRP, sin_BRP, inverse))

    @staticmethod
    @once
    def backward(ctx, grad):
        return None, ctx.turned(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


def _turned(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool) -> Tensor:
    return in_dtype(turn(at_least_float32(x), cos_BRP, sin_BRP, inverse), x.dtype)


def turn(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool = False) -> Tensor:
    """Return `x`, in float32 or float64, rotated, as a new tensor. Autograd sees the single operations."""
    cos, sin = in_dtype(cos_BRP, x.dtype), in_dtype(sin_BRP, x.dtype)
    sin = -sin if inverse else sin
    pairs = x.shape[-1] // 2
    still = pairs - cos.shape[-1]
    # In row-major order for any strides of x, because pairs must be adjacent in memory.
    out = x.clone(memory_format=torch.contiguous_format)
    if torch.compiler.is_compiling():
        cos, sin = (cos[:, :, None], sin[:, :, None]) if x.ndim == 4 else (cos, sin)
        turned = out.unflatten(-1, (pairs, 2))[..., still:, :]
        a, b = turned.unbind(-1)
        turned.copy_(torch.stack((a * cos - b * sin, a * sin + b * cos), -1))
    else:
        # A complex product is several times faster than four real ones, but compilers reject it.
        phase = torch.complex(cos, sin)
        out.view(phase.dtype)[..., still:].mul_(phase[:, :, None] if x.ndim == 4 else phase)
    return out
