"""Plain PyTorch attention over all slots with a mask. M = H / G is the number of query heads per key head."""

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
    """Check the inputs.

    Raises:
        ValueError: if a letter has two sizes, G does not divide H, width < 1, or F < R with `width` or `whole`.
    """
    sizes, width = agree("attend_range", inputs), inputs.width
    require_divided_heads("attend_range", sizes)
    require("attend_range", width is None or width >= 1, f"width must be at least 1, got {width}")
    fits = width is None and not inputs.whole or sizes["F"] >= sizes["R"]
    message = f"key_BFGC must have F >= R with width or whole, got F = {sizes['F']} and R = {sizes['R']}"
    require("attend_range", fits, message)


def attend_range(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_range`."""
    query, key, value = (at_least_float32(x) for x in inputs[:3])
    slots, groups, channels = key.shape[1:]
    logit_BGMRF = torch.einsum("brgmc,bfgc->bgmrf", query.unflatten(2, (groups, -1)) * channels**-0.5, key)
    hidden_BRF = ~visible(slots, inputs.first_BR, inputs.last_BR)
    hidden_B11RF = hidden_BRF[:, None, None]
    lowest = torch.finfo(logit_BGMRF.dtype).min  # with -inf, a row that sees no slot would have NaN gradients
    weight_BGMRF = logit_BGMRF.masked_fill(hidden_B11RF, lowest).softmax(-1).masked_fill(hidden_B11RF, 0)
    out_BRGMC = torch.einsum("bgmrf,bfgc->brgmc", weight_BGMRF, value)
    return out_BRGMC.flatten(2, 3).to(inputs.query_BRHC.dtype)
