"""PyTorch's `scaled_dot_product_attention`, with masks made from the ranges.

Without `width`, chunks of rows attend to all slots; with it, blocks of rows attend to the slots of their window.

With a mask, the M query heads of a key head become M rows, so that keys and values are not repeated. PyTorch's
`enable_gqa` has no fused GPU kernel with a mask.

Rows that see no slot are given one, because an empty softmax has NaN gradients; their output is then set to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ..device import at_least_float32, scratch_elements
from ..joint import Cut, cut, pad_rows, window_blocks
from ..rows import slices
from ..slots import visible
from .reference import Inputs


def refuses(inputs: Inputs) -> str | None:
    """Return why PyTorch cannot take this call, or None; without slots or rows, its result is NaN."""
    return None if inputs.key_BFGC.shape[1] and inputs.query_BRHC.shape[1] else "needs at least one row and one slot"


def attend_range(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_range`."""
    inputs, dtype = in_one_dtype(inputs), inputs.query_BRHC.dtype
    rows, slots, device = inputs.query_BRHC.shape[1], inputs.key_BFGC.shape[1], inputs.query_BRHC.device.type
    narrow = inputs.width is not None and inputs.width < slots
    if inputs.whole and not narrow:
        if rows in (1, slots) or device == "cuda":
            return _attend_whole(*inputs[:3]).to(dtype)
        if device == "cpu" and not torch.is_grad_enabled():
            return _attend_chunk(*inputs[:3]).to(dtype)
    out_BRHC = _by_blocks(inputs) if narrow else _by_rows(inputs)
    return out_BRHC.masked_fill((inputs.first_BR >= inputs.last_BR)[..., None, None], 0).to(dtype)


def in_one_dtype(inputs: Any) -> Any:
    """Return inputs whose queries, keys and values have one dtype, that of the products."""
    query_BRHC = inputs.query_BRHC
    if query_BRHC.device.type != "cuda":  # CUDA kernels sum in float32; CPU kernels round the weights to 16 bits
        query_BRHC = at_least_float32(query_BRHC)
    # Under autocast, queries may be bfloat16 and cached keys float32.
    key_BFGC, value_BFGC = inputs.key_BFGC.to(query_BRHC.dtype), inputs.value_BFGC.to(query_BRHC.dtype)
    return inputs._replace(query_BRHC=query_BRHC, key_BFGC=key_BFGC, value_BFGC=value_BFGC)


def _by_rows(inputs: Inputs) -> Tensor:
    """Attend to all slots, in chunks of rows that limit the size of the mask."""
    query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR = inputs[:5]

    def attend(part: slice) -> Tensor:
        first, last = first_BR[:, part], last_BR[:, part]
        mask_BRF = visible(key_BFGC.shape[1], first, last)
        mask_BRF[..., 0] |= first >= last
        return attend_masked(query_BRHC[:, part], key_BFGC, value_BFGC, mask_BRF[:, None])

    return in_parts(attend, query_BRHC, key_BFGC)


def in_parts(attend: Callable[[slice], Tensor], query_BRHC: Tensor, key_BFGC: Tensor) -> Tensor:
    """Return the outputs of all rows, by calling `attend` for chunks of rows that limit the size of the mask."""
    (batch, rows, heads), slots = query_BRHC.shape[:3], key_BFGC.shape[1]
    parts = slices(rows, max(1, 8 * scratch_elements(query_BRHC.device) // (batch * heads * slots)))
    outs = [attend(part) for part in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _by_blocks(inputs: Inputs) -> Tensor:
    """Attend in blocks of about `width` rows, each to the slots that its rows can see. See `gsm_kernels.joint`."""
    query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, width, _ = inputs
    assert width is not None
    (batch, rows), (slots, groups) = query_BRHC.shape[:2], key_BFGC.shape[1:3]
    blocks = cut(rows, slots, width)
    query = pad_rows(query_BRHC, blocks).unflatten(1, (blocks.count, -1)).flatten(0, 1)
    key, value = (window_blocks(x.flatten(2), blocks).unflatten(2, (groups, -1)) for x in (key_BFGC, value_BFGC))
    out = attend_masked(query, key, value, _block_mask(first_BR, last_BR, blocks)[:, None])
    return out.unflatten(0, (batch, -1)).flatten(1, 2)[:, :rows]


def _block_mask(first_BR: Tensor, last_BR: Tensor, blocks: Cut) -> Tensor:
    """Return which slots of its block each row sees, bool [B*n,Q,Y]; a row that sees none is given the last."""
    device, before = first_BR.device, blocks.entries - blocks.rows - (blocks.width - 1)
    block_n1 = torch.arange(blocks.count, device=device)[:, None]
    slot_nY = before + block_n1 * blocks.size + torch.arange(blocks.span, device=device)
    first, last = (pad_rows(x[..., None], blocks).unflatten(1, (blocks.count, -1)) for x in (first_BR, last_BR))
    mask_BnQY = (slot_nY[:, None] >= first) & (slot_nY[:, None] < last)
    mask_BnQY[..., -1:] |= first >= last
    return mask_BnQY.flatten(0, 1)


def _attend_whole(query_BRHC: Tensor, key_BFGC: Tensor, value_BFGC: Tensor) -> Tensor:
    """Attend causally from the last R of F slots, without a mask tensor, so that PyTorch can use a fused kernel."""
    rows, slots, shared = query_BRHC.shape[1], key_BFGC.shape[1], query_BRHC.shape[2] // key_BFGC.shape[2]
    heads_first = (x.transpose(1, 2) for x in (query_BRHC, key_BFGC, value_BFGC))
    mask = causal_lower_right(rows, slots) if 1 < rows < slots else None
    causal = rows == slots
    return scaled_dot_product_attention(
        *heads_first, attn_mask=mask, is_causal=causal, enable_gqa=shared > 1
    ).transpose(1, 2)  # fmt: skip


def _attend_chunk(query_BRHC: Tensor, key_BFGC: Tensor, value_BFGC: Tensor) -> Tensor:
    """Attend causally from the last R of F slots, on a CPU, without gradients.

    PyTorch's fused CPU kernel is causal only for R = F. So it runs twice, on the F - R earlier slots and on the last R,
    and the log-sum-exps that it returns combine the two outputs. These have no gradient, so this is for prefill only.
    """
    rows, shared = query_BRHC.shape[1], query_BRHC.shape[2] // key_BFGC.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query_BRHC, key_BFGC, value_BFGC))
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    before, sum_before = kernel(query, key[:, :, :-rows], value[:, :, :-rows])
    recent, sum_recent = kernel(query, key[:, :, -rows:], value[:, :, -rows:], is_causal=True)
    share = torch.sigmoid(sum_recent - sum_before)[..., None].to(recent.dtype)
    return torch.lerp(before, recent, share).transpose(1, 2)


def attend_masked(query_BRHC: Tensor, key_BFGC: Tensor, value_BFGC: Tensor, mask_BGRF: Tensor) -> Tensor:
    """Attend with a mask [B,G,R,F], or [B,1,R,F] for all key heads; True is visible."""
    groups, shared = key_BFGC.shape[2], query_BRHC.shape[2] // key_BFGC.shape[2]
    key, value = key_BFGC.transpose(1, 2), value_BFGC.transpose(1, 2)
    query = query_BRHC.unflatten(2, (groups, shared)).transpose(1, 2).flatten(2, 3)
    mask = mask_BGRF if shared == 1 else mask_BGRF.repeat_interleave(shared, 2)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return out.unflatten(2, (-1, shared)).transpose(1, 2).flatten(2, 3)
