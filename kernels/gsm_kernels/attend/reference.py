"""Plain PyTorch attention over a window and a selection, in chunks of rows, with a hand-written backward.

A call of one chunk saves its softmax for backward. A longer call saves only its inputs, and backward computes each
chunk's softmax again. Letters as in `gsm_kernels.joint`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision, once, scratch_elements
from ..inputs import keep, kept
from ..joint import (
    Cut,
    Far,
    add_window_blocks,
    as_bias,
    chunks,
    cut,
    join,
    pad_rows,
    probabilities,
    window_blocks,
    window_visible,
)
from ..rotate.reference import turn
from ..slots import flat_slots, gather_slots
from .inputs import Inputs


def attend(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend` and `gsm_kernels.attend_band`."""
    return _Attention.apply(*inputs)


class _Chunk(NamedTuple):
    """The rows of one chunk, padded to whole blocks: intermediate results of forward that backward needs too."""

    cut: Cut
    query_BRHC: Tensor
    window: Tensor
    far: Far | None
    softmax: Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        """Compute [B,R,H,C] from the fields of `Inputs`; save the softmax if all rows are one chunk."""
        inputs = Inputs(*arguments)
        ranges = _row_chunks(inputs)
        out_BRHC = torch.empty_like(inputs.query_BRHC, memory_format=torch.contiguous_format)
        softmax = None
        for rows in ranges:
            chunk = _chunk(inputs, rows)
            mixed_BRHC = _mix(chunk)[:, : rows.stop - rows.start]
            out_BRHC[:, rows] = turn(mixed_BRHC, inputs.cos_BRP[:, rows], inputs.sin_BRP[:, rows], inverse=True)
            softmax = chunk.softmax if len(ranges) == 1 else None
        keep(ctx, inputs, softmax)
        return out_BRHC

    @staticmethod
    @once
    def backward(ctx, grad_BRHC):
        """Return a gradient for each field of `Inputs`, in its dtype."""
        inputs, softmax = kept(ctx, Inputs)
        with full_precision(grad_BRHC):
            return _gradients(inputs, softmax, grad_BRHC)


def _gradients(inputs: Inputs, softmax: Tensor | None, grad_BRHC: Tensor) -> tuple[Tensor | None, ...]:
    wide = at_least_float32(inputs.query_BRHC[:0]).dtype
    whole = torch.contiguous_format
    bank, index, bias = inputs.bank_BFC, inputs.index_BRK, inputs.bias_BRK
    query_grad = torch.empty_like(inputs.query_BRHC, memory_format=whole)
    window_grad = torch.zeros_like(inputs.window_BEC, dtype=wide, memory_format=whole)
    sink_grad = torch.zeros_like(inputs.sink_H, dtype=wide)
    bank_grad = None if bank is None else torch.zeros_like(bank, dtype=wide, memory_format=whole)
    bias_grad = None if bias is None else torch.zeros_like(bias, dtype=wide, memory_format=whole)
    for rows in _row_chunks(inputs):
        length, cos, sin = rows.stop - rows.start, inputs.cos_BRP[:, rows], inputs.sin_BRP[:, rows]
        chunk = _chunk(inputs, rows, softmax)
        mixed_grad = pad_rows(turn(grad_BRHC[:, rows].to(wide), cos, sin), chunk.cut)
        logit_grad = _logit_grad(chunk, mixed_grad)
        sink_grad += logit_grad[..., -1].unflatten(1, (-1, sink_grad.shape[0])).sum((0, 1))
        rows_grad = _mix(chunk._replace(softmax=logit_grad))[:, :length].mul_(chunk.query_BRHC.shape[-1] ** -0.5)
        query_grad[:, rows] = turn(rows_grad, cos, sin, inverse=True)
        window_part = _window_grad(chunk, mixed_grad, logit_grad)
        add_window_blocks(window_grad[:, stream(inputs, rows)], window_part, chunk.cut)
        if bank_grad is not None and index is not None and chunk.far is not None:
            _add_far_grad(bank_grad, index[:, rows], chunk, chunk.far.keys, mixed_grad, logit_grad)
        if bias_grad is not None and bank is not None and not _dense(bank.shape[1], bias_grad.shape[2], bias):
            by_head = logit_grad.view(*chunk.query_BRHC.shape[:3], -1)[:, :length]
            bias_grad[:, rows] = by_head[..., chunk.window.shape[1] : -1].sum(2)
    return inputs.gradients(query_grad, window_grad, sink_grad, bank_grad, bias_grad)


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
    """Return the blocks of these rows, their queries (rotated, scaled and padded), and the entries of the blocks."""
    seen = stream(inputs, rows)
    blocks = cut(rows.stop - rows.start, seen.stop - seen.start, inputs.width)
    query = at_least_float32(inputs.query_BRHC[:, rows])
    rotated = turn(query, inputs.cos_BRP[:, rows], inputs.sin_BRP[:, rows])
    query_BRHC = pad_rows(rotated.mul_(query.shape[-1] ** -0.5), blocks)
    return blocks, query_BRHC, window_blocks(inputs.window_BEC[:, seen].to(query.dtype), blocks)


def _chunk(inputs: Inputs, rows: slice, softmax: Tensor | None = None) -> _Chunk:
    blocks, query_BRHC, window = near(inputs, rows)
    far, bias_BRK, dtype = None, None, query_BRHC.dtype
    if inputs.bank_BFC is not None and inputs.index_BRK is not None:
        index_BRK = pad_rows(inputs.index_BRK[:, rows], blocks, -1)
        if inputs.bias_BRK is not None:
            bias_BRK = pad_rows(inputs.bias_BRK[:, rows].to(dtype), blocks)
        far = _far(inputs.bank_BFC, index_BRK, bias_BRK, dtype)
    if softmax is None:
        visible = window_visible(inputs.position_BR[:, rows], blocks)
        softmax = probabilities(query_BRHC, window, visible, inputs.sink_H.to(dtype), far)
    return _Chunk(blocks, query_BRHC, window, far, softmax)


def _dense(slots: int, picks: int, bias_BRK: Tensor | None) -> bool:
    """Return whether to multiply with the whole bank and a mask instead of a gather, which is faster for small banks.

    A bias belongs to a selected place and not to a slot, so it needs the gather, unless there is nothing to gather.
    """
    return slots == 0 or picks == 0 or (bias_BRK is None and slots <= 2 * picks)


def _far(bank_BFC: Tensor, index_BRK: Tensor, bias_BRK: Tensor | None, dtype: torch.dtype) -> Far:
    slots = bank_BFC.shape[1]
    if _dense(slots, index_BRK.shape[2], bias_BRK):
        bank_BFC = bank_BFC.to(dtype)
        times_BRF = bank_BFC.new_zeros(*index_BRK.shape[:2], slots + 1)
        times_BRF.scatter_add_(2, index_BRK.remainder(slots + 1), torch.ones_like(index_BRK, dtype=bank_BFC.dtype))
        times_BRF = times_BRF[..., :slots]
        # The bias is log(times). The CPU's vector log is a hundred times slower for zeros, so these are replaced.
        return Far(bank_BFC, times_BRF.clamp(min=1).log_().masked_fill_(times_BRF == 0, -torch.inf))
    keys = gather_slots(bank_BFC, index_BRK).to(dtype)  # after gathering, so that a decoding step reads only K slots
    hidden = index_BRK < 0
    bias = as_bias(~hidden, dtype) if bias_BRK is None else bias_BRK.masked_fill(hidden, -torch.inf)
    return Far(keys, bias)


def _mix(chunk: _Chunk) -> Tensor:
    batch, rows, heads, channels = chunk.query_BRHC.shape
    span = chunk.window.shape[1]
    out = torch.bmm(chunk.softmax[..., :span], chunk.window)
    if chunk.far is not None:
        keys = chunk.far.keys
        weight = chunk.softmax.view(keys.shape[0], -1, chunk.softmax.shape[-1])[..., span:-1]
        out.view(keys.shape[0], -1, channels).baddbmm_(weight, keys)
    return out.view(batch, rows, heads, channels)


def _logit_grad(chunk: _Chunk, mixed_grad: Tensor) -> Tensor:
    channels = mixed_grad.shape[-1]
    sources = [chunk.window] if chunk.far is None else [chunk.window, chunk.far.keys]
    parts = [torch.bmm(mixed_grad.view(keys.shape[0], -1, channels), keys.mT) for keys in sources]
    # The sink has no value, so its probability has no direct gradient; the softmax couples it to the others.
    grad = join(parts, mixed_grad.new_zeros(chunk.softmax.shape[:2].numel()), chunk.softmax.shape[0])
    return torch._softmax_backward_data(grad, chunk.softmax, -1, grad.dtype)


def _window_grad(chunk: _Chunk, mixed_grad: Tensor, logit_grad: Tensor) -> Tensor:
    blocks, channels, span = chunk.window.shape[0], mixed_grad.shape[-1], chunk.window.shape[1]
    grad = torch.bmm(logit_grad[..., :span].mT, chunk.query_BRHC.view(blocks, -1, channels))
    return grad.baddbmm_(chunk.softmax[..., :span].mT, mixed_grad.view(blocks, -1, channels))


def _add_far_grad(
    bank_grad: Tensor, index_BRK: Tensor, chunk: _Chunk, keys: Tensor, mixed_grad: Tensor, logit_grad: Tensor
) -> None:
    """Add the gradient of the far entries to that of the bank: directly, or scattered to the gathered slots."""
    span, columns = chunk.window.shape[1], logit_grad.shape[-1]
    groups, channels = keys.shape[0], keys.shape[-1]
    from_logits, weight = (x.view(groups, -1, columns)[..., span:-1].mT for x in (logit_grad, chunk.softmax))
    grad = torch.bmm(from_logits, chunk.query_BRHC.view(groups, -1, channels))
    grad.baddbmm_(weight, mixed_grad.view(groups, -1, channels))
    if grad.shape == bank_grad.shape:
        bank_grad += grad
        return
    grad = grad.unflatten(0, (bank_grad.shape[0], -1))[:, : index_BRK.shape[1]]
    bank_grad.view(-1, channels).index_add_(0, flat_slots(index_BRK, bank_grad.shape[1]), grad.reshape(-1, channels))
