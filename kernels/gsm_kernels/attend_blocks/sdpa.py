"""PyTorch's own attention with masks made from the chosen blocks, on all slots for some rows at a time.

It also multiplies invisible slots, but has no gather. With many rows, and not many more slots than a row sees, it takes
less time, and in training far less memory.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..attend_range.sdpa import attend_masked, in_one_dtype, in_parts
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
    inputs, dtype = in_one_dtype(inputs), inputs.query_BRHC.dtype
    return in_parts(partial(_attend, inputs), inputs.query_BRHC, inputs.key_BFGC).to(dtype)


def _attend(inputs: Inputs, part: slice) -> Tensor:
    """Compute the rows of a slice."""
    first_BR, last_BR, chosen_BRGN = (x[:, part] for x in (inputs.first_BR, inputs.last_BR, inputs.chosen_BRGN))
    seen_BRGF = visible_blocks(inputs.key_BFGC.shape[1], first_BR, last_BR, chosen_BRGN, inputs.block)
    nothing_BRG = ~seen_BRGF.any(-1)
    seen_BRGF[..., 0] |= nothing_BRG  # otherwise an empty softmax spreads NaN through backward
    mask_BGRF = seen_BRGF.transpose(1, 2)
    out_BRHC = attend_masked(inputs.query_BRHC[:, part], inputs.key_BFGC, inputs.value_BFGC, mask_BGRF)
    out_BRGMC = out_BRHC.unflatten(2, (nothing_BRG.shape[2], -1))
    return out_BRGMC.masked_fill(nothing_BRG[..., None, None], 0).flatten(2, 3)
