"""Causal attention to selected blocks of slots: for every row and each group of heads, a few blocks of its document.

This is `gsm_kernels.attend_range`, except that a row sees a slot of its range [first, last) only if the slot is in one
of the row's blocks. Block n of a row is the slots first + n block to first + (n + 1) block - 1. Slots of the last block
beyond the range are not seen. The output of a row that sees no slot is 0.

Args:
    query_BRHC: queries, after any rotation.
    key_BFGC, value_BFGC: keys and values of F slots (F may be 0). H is a multiple of G; head h is in group h // (H /
        G).
    first_BR, last_BR: int64, the slots [first, last) of a row's document up to its own.
    chosen_BRGN: int64, numbers of distinct blocks in any order; -1 for none.
    block: slots per block.

Returns:
    out_BRHC in the query's dtype. Computed in float32, or in float64 for float64 inputs; on a GPU, fast implementations
    multiply half types without conversion and sum in float32. There is no gradient for `chosen_BRGN`.

Raises:
    ValueError: if the shapes do not fit.

Letters: B sequences, R rows, H query heads, G key and value heads, F slots, C channels of a head, N blocks of a row, L
slots of these blocks (N times `block`), M query heads per key head.

Source: the selected branch of Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable
Sparse Attention".
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gsm_kernels import Impl, Op
from gsm_kernels.attend_range.sdpa import attend_masked, in_one_dtype, in_parts
from gsm_kernels.device import at_least_float32, scratch_elements
from gsm_kernels.rows import slices
from gsm_kernels.shapes import agree
from gsm_kernels.slots import visible_blocks

MOST = 64  # with a larger ratio of all slots to the slots that a row sees, masks are not used


class Inputs(NamedTuple):
    """The parameters of `attend_blocks`, documented above."""

    query_BRHC: Tensor
    key_BFGC: Tensor
    value_BFGC: Tensor
    first_BR: Tensor
    last_BR: Tensor
    chosen_BRGN: Tensor
    block: int


def _gathered(inputs: Inputs) -> Tensor:
    """Gather the chosen keys and values, some rows at a time."""
    (batch, rows), channels = inputs.query_BRHC.shape[:2], inputs.query_BRHC.shape[3]
    groups, blocks = inputs.chosen_BRGN.shape[2:]
    if 0 in (rows, inputs.key_BFGC.shape[1], blocks):
        return torch.zeros_like(inputs.query_BRHC)
    row = max(1, batch * groups * blocks * inputs.block * channels)
    step = max(1, scratch_elements(inputs.query_BRHC.device) // row)
    parts = [_attend_gathered(inputs, part) for part in slices(rows, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_gathered(inputs: Inputs, part: slice) -> Tensor:
    """Compute the rows of a slice."""
    query_BRHC, chosen_BRGN = inputs.query_BRHC[:, part], inputs.chosen_BRGN[:, part]
    first_BR11, last_BR11 = (x[:, part, None, None] for x in (inputs.first_BR, inputs.last_BR))
    within = torch.arange(inputs.block, device=chosen_BRGN.device)
    slot_BRGL = first_BR11 + (chosen_BRGN[..., None] * inputs.block + within).flatten(-2)
    chosen_BRGL = chosen_BRGN.repeat_interleave(inputs.block, dim=-1)
    hidden_BRGL = (chosen_BRGL < 0) | (slot_BRGL >= last_BR11)
    slot_BRGL = slot_BRGL.masked_fill(hidden_BRGL, 0)
    key, value = (_gather(at_least_float32(x), slot_BRGL) for x in (inputs.key_BFGC, inputs.value_BFGC))
    query_BRGMC = at_least_float32(query_BRHC).unflatten(2, (key.shape[2], -1)) * query_BRHC.shape[-1] ** -0.5
    logit_BRGML = torch.einsum("brgmc,brglc->brgml", query_BRGMC, key)
    hidden_BRG1L = hidden_BRGL[..., None, :]
    lowest = torch.finfo(logit_BRGML.dtype).min  # finite, because -inf gives a row that sees nothing a gradient of NaN
    weight_BRGML = logit_BRGML.masked_fill(hidden_BRG1L, lowest).softmax(-1).masked_fill(hidden_BRG1L, 0)
    out_BRGMC = torch.einsum("brgml,brglc->brgmc", weight_BRGML, value)
    return out_BRGMC.flatten(2, 3).to(query_BRHC.dtype)


def _gather(x_BFGC: Tensor, slot_BRGL: Tensor) -> Tensor:
    """Return the contents of these slots of each group, [B, R, G, L, C]."""
    batch, rows, groups, _ = slot_BRGL.shape
    flat_BG = slot_BRGL.transpose(1, 2).flatten(2)[..., None].expand(-1, -1, -1, x_BFGC.shape[-1])
    return x_BFGC.transpose(1, 2).gather(2, flat_BG).view(batch, groups, rows, -1, x_BFGC.shape[-1]).transpose(1, 2)


def _unmasked(inputs: Inputs) -> str | None:
    """Return why this call cannot use masks, or None."""
    rows, slots = inputs.query_BRHC.shape[1], inputs.key_BFGC.shape[1]
    visible = inputs.chosen_BRGN.shape[3] * inputs.block
    if 0 in (rows, slots, visible):  # PyTorch's result would be NaN
        return "needs at least one row, one slot and one block"
    if rows == 1 and visible < slots:
        return "a single row gathers its slots"
    most = MOST * visible
    return None if slots <= most else f"takes at most {most} slots for rows that see {visible}, got {slots}"


def _masked(inputs: Inputs) -> Tensor:
    """Run PyTorch's attention on all slots, with masks made from the chosen blocks, some rows at a time.

    This multiplies invisible slots too, but gathers none. With many rows, and not many more slots than a row sees, it
    takes less time, and in training far less memory.
    """
    inputs, dtype = in_one_dtype(inputs), inputs.query_BRHC.dtype
    return in_parts(partial(_attend_masked, inputs), inputs.query_BRHC, inputs.key_BFGC).to(dtype)


def _attend_masked(inputs: Inputs, part: slice) -> Tensor:
    """Compute the rows of a slice."""
    first_BR, last_BR, chosen_BRGN = (x[:, part] for x in (inputs.first_BR, inputs.last_BR, inputs.chosen_BRGN))
    seen_BRGF = visible_blocks(inputs.key_BFGC.shape[1], first_BR, last_BR, chosen_BRGN, inputs.block)
    nothing_BRG = ~seen_BRGF.any(-1)
    seen_BRGF[..., 0] |= nothing_BRG  # otherwise an empty softmax spreads NaN through backward
    mask_BGRF = seen_BRGF.transpose(1, 2)
    out_BRHC = attend_masked(inputs.query_BRHC[:, part], inputs.key_BFGC, inputs.value_BFGC, mask_BGRF)
    out_BRGMC = out_BRHC.unflatten(2, (nothing_BRG.shape[2], -1))
    return out_BRGMC.masked_fill(nothing_BRG[..., None, None], 0).flatten(2, 3)


attend_blocks = Op(
    "attend_blocks",
    _gathered,
    (Impl("sdpa", _masked, _unmasked),),
    inputs=Inputs,
    check=partial(agree, "attend_blocks"),
    doc=__doc__,
)
