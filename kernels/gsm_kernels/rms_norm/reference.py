"""Plain PyTorch RMSNorm."""

from __future__ import annotations

from torch import Tensor

from ..device import at_least_float32, in_dtype
from ..recomputed import recomputed


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """See `gsm_kernels.rms_norm`."""
    return recomputed(_normed, x, weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return in_dtype(wide * inverse * in_dtype(weight, wide.dtype), x.dtype)
