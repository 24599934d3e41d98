"""PyTorch's own RMSNorm, in at least float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device import at_least_float32, in_dtype
from ..recomputed import recomputed


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """See `gsm_kernels.rms_norm`."""
    return recomputed(_normed, x, weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    return in_dtype(F.rms_norm(wide, x.shape[-1:], in_dtype(weight, wide.dtype), eps), x.dtype)
