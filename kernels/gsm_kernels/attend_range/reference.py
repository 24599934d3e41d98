"""Plain PyTorch attention over all slots under a mask, also for a window. M query heads share a key head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import at_least_float32
from ..shapes import agree, require, require_divided_heads
from ..slots import visible


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.attend_range`, documented there."""

    query_BRHC: Tensor
    key_BFGC: Tensor
    value_BFGC: Tensor
    first_BR: Tensor
    last_BR: Tensor
    width: int | None = None
    whole: bool = False


def check(inputs: Inputs) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes, G does not divide H, the window is narrower than 1,
    or the rows do not fit into the slots that they stand at."""
    sizes, width = agree("attend_range", inputs), inputs.width
    require_divided_heads("attend_range", sizes)
    require("attend_range", width is None or width >= 1, f"width = {width} must be at least 1")
    fits = width is None and not inputs.whole or sizes["F"] >= sizes["R"]
    require("attend_range", fits, f"{sizes['F']} slots do not hold the {sizes['R']} rows themselves")


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
