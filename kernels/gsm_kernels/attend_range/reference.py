"""Plain PyTorch attention over all slots under a mask, also for a window. M query heads share a key head."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32
from ..slots import visible
from .inputs import Inputs


def attend_range(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_range`."""
    query, key, value = (at_least_float32(x) for x in inputs[:3])
    slots, groups, channels = key.shape[1:]
    logit_BGMRF = torch.einsum("brgmc,bfgc->bgmrf", query.unflatten(2, (groups, -1)) * channels**-0.5, key)
    hidden_BRF = ~visible(slots, inputs.first_BR, inputs.last_BR)
    hidden_B11RF = hidden_BRF[:, None, None]
    lowest = torch.finfo(logit_BGMRF.dtype).min  # finite, because -inf gives a row that sees nothing a gradient of NaN
    weight_BGMRF = logit_BGMRF.masked_fill(hidden_B11RF, lowest).softmax(-1).masked_fill(hidden_B11RF, 0)
    out_BRGMC = torch.einsum("bgmrf,bfgc->brgmc", weight_BGMRF, value)
    return out_BRGMC.flatten(2, 3).to(inputs.query_BRHC.dtype)
