"""RMSNorm over the last dimension (Zhang and Sennrich, 2019), computed in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gsm.layers.rope import Angles
from gsm_kernels import rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, in the dtype of ``x``.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, angles: Angles | None = None) -> Tensor:
        """Normalise the last dimension; with angles, also rotate it, as ``gsm_kernels.rotate`` does."""
        if angles is None:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps, *angles)
