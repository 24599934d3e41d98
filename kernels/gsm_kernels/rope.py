"""Rotary positions: `rotate` turns adjacent pairs of the last channels by one angle per pair.

B batch, R rows, H heads, C channels, P here the number of angles: half as many as rotated channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .device import at_least_float32, handed_out, in_dtype, once


def rotate(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2P channels of `x`; channels before them pass through.

    The pair (a, b) at channels C-2P+2p and C-2P+2p+1 becomes (a cos - b sin, a sin + b cos). `inverse` rotates in the
    other direction and is the exact adjoint. Su et al. 2021, "RoFormer", equation 15, in the interleaved layout.

    Args:
        x: [B,R,C] or [B,R,H,C]; C even. Differentiable.
        cos_BRP, sin_BRP: one angle per pair, P <= C/2. No gradient.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(x, cos_BRP, sin_BRP)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotation.apply(x, cos_BRP, sin_BRP, inverse)
    return in_dtype(turn(at_least_float32(x), cos_BRP, sin_BRP, inverse), x.dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos_BRP, sin_BRP, inverse):
        ctx.save_for_backward(cos_BRP, sin_BRP)
        ctx.inverse = inverse
        return handed_out(turn(at_least_float32(x), cos_BRP, sin_BRP, inverse), x.dtype)

    @staticmethod
    @once
    def backward(ctx, grad):
        cos_BRP, sin_BRP = ctx.saved_tensors
        return turn(at_least_float32(grad), cos_BRP, sin_BRP, not ctx.inverse).to(grad.dtype), None, None, None


def turn(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool = False) -> Tensor:
    """Rotate without a gradient function of its own. `x` must be float32 or float64; the result is a new tensor."""
    cos, sin = in_dtype(cos_BRP, x.dtype), in_dtype(sin_BRP, x.dtype)
    sin = -sin if inverse else sin
    pairs = x.shape[-1] // 2
    still = pairs - cos.shape[-1]
    # A copy in row-major order for any strides of x, because pairs must be adjacent in memory.
    out = x.clone(memory_format=torch.contiguous_format)
    if torch.compiler.is_compiling():
        cos, sin = (cos[:, :, None], sin[:, :, None]) if x.ndim == 4 else (cos, sin)
        turned = out.unflatten(-1, (pairs, 2))[..., still:, :]
        a, b = turned.unbind(-1)
        turned.copy_(torch.stack((a * cos - b * sin, a * sin + b * cos), -1))
    else:
        # One complex product is several times faster than four real ones on strided halves, but compilers reject it.
        phase = torch.complex(cos, sin)
        out.view(phase.dtype)[..., still:].mul_(phase[:, :, None] if x.ndim == 4 else phase)
    return out


def _check(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor) -> None:
    if x.ndim not in (3, 4) or cos_BRP.shape != sin_BRP.shape or cos_BRP.shape[:2] != x.shape[:2]:
        shapes = f"{tuple(x.shape)}, {tuple(cos_BRP.shape)} and {tuple(sin_BRP.shape)}"
        raise ValueError(f"rotate: x, cos and sin have shapes {shapes}. Use [B,R,(H,)C], [B,R,P] and [B,R,P]")
    if x.shape[-1] % 2 or 2 * cos_BRP.shape[-1] > x.shape[-1]:
        pairs = cos_BRP.shape[-1]
        raise ValueError(f"rotate: {x.shape[-1]} channels do not hold {pairs} pairs; C must be even and >= 2P")
