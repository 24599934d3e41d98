"""PyTorch's `F.rms_norm` in float32 or float64, then an optional rotation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device import at_least_float32, in_dtype
from ..recomputed import recomputed
from ..rotate.reference import rotate


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, cos_BRP: Tensor | None = None, sin_BRP: Tensor | None = None
) -> Tensor:
    """See `gsm_kernels.rms_norm`."""
    return rotated(recomputed(_normed, x, weight, eps), cos_BRP, sin_BRP)


def rotated(x: Tensor, cos_BRP: Tensor | None, sin_BRP: Tensor | None) -> Tensor:
    """Return `x` rotated, or `x` itself if there are no angles."""
    return x if cos_BRP is None or sin_BRP is None else rotate(x, cos_BRP, sin_BRP)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    return in_dtype(F.rms_norm(wide, x.shape[-1:], in_dtype(weight, wide.dtype), eps), x.dtype)
