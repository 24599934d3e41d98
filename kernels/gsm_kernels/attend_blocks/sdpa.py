"""PyTorch's own attention with masks made from the chosen blocks, on all slots for some rows at a time.

It also multiplies invisible slots, but has no gather. With many rows, and not many more slots than a row sees, it takes
less time, and in training far less memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attend_range.sdpa import attend_masked
from ..device import at_least_float32, scratch_elements
from ..rows import slices
from ..slots import visible_blocks
from .inputs import Inputs

MOST = 64  # largest ratio of all slots to the slots that a row sees


def refuses(inputs: Inputs) -> str | None:
    """Return why this call cannot use masks, or None."""
    rows, slots = inputs.query_BRHC.shape[1], inputs.key_BFGC.shape[1]
    visible = inputs.chosen_BRGN.shape[3] * inputs.block
    if 0 in (rows, slots, visible):  # PyTorch's result would be NaN
        return "needs at least one row, one slot and one block"
    if rows == 1 and visible < slots:
        return "a single row gathers its slots"
    most = MOST * visible
    return None if slots <= most else f"takes at most {most} slots for rows that see {visible}, got {slots}"


def attend_blocks(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_blocks`."""
    query_BRHC, dtype = inputs.query_BRHC, inputs.query_BRHC.dtype
    if query_BRHC.device.type != "cuda":  # CUDA kernels sum in float32; the CPU's round the weights to a half type
        query_BRHC = at_least_float32(query_BRHC)
    inputs = inputs._replace(query_BRHC=query_BRHC)
    (batch, slots), heads = inputs.key_BFGC.shape[:2], query_BRHC.shape[2]
    size = max(1, 8 * scratch_elements(query_BRHC.device) // (batch * heads * slots))
    parts = [_attend(inputs, part) for part in slices(query_BRHC.shape[1], size)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(dtype)


def _attend(inputs: Inputs, part: slice) -> Tensor:
    """Compute the rows of a slice."""
    query_BRHC, (slots, groups) = inputs.query_BRHC[:, part], inputs.key_BFGC.shape[1:3]
    first_BR, last_BR, chosen_BRGN = (x[:, part] for x in (inputs.first_BR, inputs.last_BR, inputs.chosen_BRGN))
    seen_BRGF = visible_blocks(slots, first_BR, last_BR, chosen_BRGN, inputs.block)
    nothing_BRG = ~seen_BRGF.any(-1)
    seen_BRGF[..., 0] |= nothing_BRG  # otherwise an empty softmax spreads NaN through backward
    key_BFGC, value_BFGC = inputs.key_BFGC.to(query_BRHC.dtype), inputs.value_BFGC.to(query_BRHC.dtype)
    out_BRHC = attend_masked(query_BRHC, key_BFGC, value_BFGC, seen_BRGF.transpose(1, 2))
    return out_BRHC.unflatten(2, (groups, -1)).masked_fill(nothing_BRG[..., None, None], 0).flatten(2, 3)
