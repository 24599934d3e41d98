"""The clamped SwiGLU product in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device import at_least_float32, in_dtype
from ..recomputed import recomputed


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See `gsm_kernels.swiglu`."""
    return recomputed(_product, gate, up, limit)


def _product(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    opened = F.silu(at_least_float32(gate).clamp(max=limit))
    return in_dtype(opened * at_least_float32(up).clamp(-limit, limit), gate.dtype)
