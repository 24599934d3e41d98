"""Plain PyTorch short convolution: a sum over distances, each with the tokens that far back."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device import at_least_float32, in_dtype
from ..recomputed import recomputed


def short_convolution(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    """See `gsm_kernels.short_convolution`."""
    return recomputed(_convolved, seen_BEC, weight, position_BT)


def _convolved(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    wide_BEC, (batch, length), (channels, width) = at_least_float32(seen_BEC), position_BT.shape, weight.shape
    padded_BEC = F.pad(wide_BEC, (0, 0, width - 1, 0))
    total_BTC, taps_WC = wide_BEC.new_zeros(batch, length, channels), in_dtype(weight, wide_BEC.dtype).T
    for back, tap_C in enumerate(taps_WC):
        earlier_BTC = padded_BEC[:, padded_BEC.shape[1] - length - back :][:, :length]
        inside_BT1 = (position_BT >= back)[..., None]  # the same document
        total_BTC = total_BTC + earlier_BTC * inside_BT1 * tap_C
    return in_dtype(total_BTC, seen_BEC.dtype)
