"""Plain PyTorch attention to chosen blocks: it gathers their keys and values, some rows at a time.

Letters: N blocks of a row, L slots of these blocks (N times `block`), M query heads per key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32, scratch_elements
from ..rows import slices
from .inputs import Inputs


def attend_blocks(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_blocks`."""
    (batch, rows), channels = inputs.query_BRHC.shape[:2], inputs.query_BRHC.shape[3]
    groups, blocks = inputs.chosen_BRGN.shape[2:]
    if 0 in (rows, inputs.key_BFGC.shape[1], blocks):
        return torch.zeros_like(inputs.query_BRHC)
    gathered = max(1, batch * groups * blocks * inputs.block * channels)
    parts = [_attend(inputs, part) for part in slices(rows, max(1, scratch_elements(inputs[0].device) // gathered))]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend(inputs: Inputs, part: slice) -> Tensor:
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
