"""Plain PyTorch attention over a window and a selection, in chunks of rows. Backward computes each chunk again.

Letters are those of `gsm_kernels.joint`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..device import at_least_float32, in_dtype, scratch_elements
from ..joint import Cut, Far, as_bias, chunks, cut, pad_rows, probabilities, window_blocks, window_visible
from ..recomputed import recomputed
from ..rotate.reference import rotate
from ..slots import gather_slots
from .inputs import Inputs


def attend(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend` and `gsm_kernels.attend_band`."""
    query_BRHC, ranges = inputs.query_BRHC, _row_chunks(inputs)
    if len(ranges) > 1:  # so that autograd sums the gradients of the chunks in float32
        inputs = inputs._make([_wide(x) for x in inputs])
    parts = [recomputed(_attend, rows, *inputs) for rows in ranges]
    return in_dtype(torch.cat(parts, 1), query_BRHC.dtype) if parts else torch.empty_like(query_BRHC)


def _wide(x: Any) -> Any:
    return at_least_float32(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def _attend(rows: slice, *arguments: Any) -> Tensor:
    """Return the outputs of some rows; `arguments` are the fields of `Inputs`."""
    inputs = Inputs(*arguments)
    blocks, query_BRHC, window = near(inputs, rows)
    (batch, padded, heads, channels), dtype, far = query_BRHC.shape, query_BRHC.dtype, None
    if inputs.bank_BFC is not None and inputs.index_BRK is not None:
        index_BRK = pad_rows(inputs.index_BRK[:, rows], blocks, -1)
        bias_BRK = None if inputs.bias_BRK is None else pad_rows(inputs.bias_BRK[:, rows].to(dtype), blocks)
        far = _far(inputs.bank_BFC, index_BRK, bias_BRK, dtype)
    visible = window_visible(inputs.position_BR[:, rows], blocks)
    softmax = probabilities(query_BRHC, window, visible, inputs.sink_H.to(dtype), far)
    mixed = torch.bmm(softmax[..., : blocks.span], window)
    if far is not None:
        weight = softmax.view(len(far.keys), -1, softmax.shape[-1])[..., blocks.span : -1]
        mixed = mixed + torch.bmm(weight, far.keys).view_as(mixed)
    mixed_BRHC = mixed.view(batch, padded, heads, channels)[:, : rows.stop - rows.start]
    out_BRHC = rotate(mixed_BRHC, inputs.cos_BRP[:, rows], inputs.sin_BRP[:, rows], inverse=True)
    return in_dtype(out_BRHC, inputs.query_BRHC.dtype)


def _row_chunks(inputs: Inputs) -> list[slice]:
    batch, rows, heads, channels = inputs.query_BRHC.shape
    whole = cut(rows, inputs.window_BEC.shape[1], inputs.width)
    far = gathered = 0
    if inputs.bank_BFC is not None and inputs.index_BRK is not None:
        slots, picks = inputs.bank_BFC.shape[1], inputs.index_BRK.shape[2]
        dense = _dense(slots, picks, inputs.bias_BRK)
        far, gathered = (slots, 0) if dense else (picks, batch * picks * channels)
    return chunks(whole, batch * heads, far, gathered, scratch_elements(inputs.query_BRHC.device))


def stream(inputs: Inputs, rows: slice) -> slice:
    """Return the range of window entries that these rows can see."""
    offset = inputs.window_BEC.shape[1] - inputs.query_BRHC.shape[1]
    return slice(max(0, offset + rows.start - (inputs.width - 1)), offset + rows.stop)


def near(inputs: Inputs, rows: slice) -> tuple[Cut, Tensor, Tensor]:
    """Return the blocks of these rows, their queries (rotated, scaled, padded), and the entries of each block."""
    seen = stream(inputs, rows)
    blocks = cut(rows.stop - rows.start, seen.stop - seen.start, inputs.width)
    query = at_least_float32(inputs.query_BRHC[:, rows])
    rotated = rotate(query, inputs.cos_BRP[:, rows], inputs.sin_BRP[:, rows])
    query_BRHC = pad_rows(rotated * query.shape[-1] ** -0.5, blocks)
    return blocks, query_BRHC, window_blocks(inputs.window_BEC[:, seen].to(query.dtype), blocks)


def _dense(slots: int, picks: int, bias_BRK: Tensor | None) -> bool:
    """Return whether to use the whole bank with a mask instead of a gather, which is faster for small banks.

    A bias is per selected place rather than per slot, so it needs the gather, unless bank or selection is empty.
    """
    return slots == 0 or picks == 0 or (bias_BRK is None and slots <= 2 * picks)


def _far(bank_BFC: Tensor, index_BRK: Tensor, bias_BRK: Tensor | None, dtype: torch.dtype) -> Far:
    slots = bank_BFC.shape[1]
    if _dense(slots, index_BRK.shape[2], bias_BRK):
        bank_BFC = bank_BFC.to(dtype)
        times_BRF = bank_BFC.new_zeros(*index_BRK.shape[:2], slots + 1)
        times_BRF.scatter_add_(2, index_BRK.remainder(slots + 1), torch.ones_like(index_BRK, dtype=bank_BFC.dtype))
        times_BRF = times_BRF[..., :slots]
        # A slot selected n times has bias log(n). The vectorised log on a CPU is a hundred times slower for zeros.
        return Far(bank_BFC, times_BRF.clamp(min=1).log_().masked_fill_(times_BRF == 0, -torch.inf))
    keys = gather_slots(bank_BFC, index_BRK).to(dtype)  # convert after the gather, so that only K slots are read
    hidden = index_BRK < 0
    bias = as_bias(~hidden, dtype) if bias_BRK is None else bias_BRK.masked_fill(hidden, -torch.inf)
    return Far(keys, bias)
