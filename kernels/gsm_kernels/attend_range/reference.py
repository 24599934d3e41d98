"""Plain PyTorch attention over ranges of slots, in chunks of rows, with a hand-written backward.

Nothing but the inputs is kept for backward, which computes the softmax of each chunk again: no tensor of all rows and
slots is ever made. M counts the query heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision, scratch_elements
from ..slots import visible


def attend_range(
    query_BRHC: Tensor,
    key_BFGC: Tensor,
    value_BFGC: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    width: int | None = None,
    whole: bool = False,
) -> Tensor:
    """See `gsm_kernels.attend_range`."""
    return _Attention.apply(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, width)


class _Chunk(NamedTuple):
    """Some rows, the slots that they can see, and what they make of these."""

    rows: slice
    slots: slice
    query_BRGMC: Tensor
    key_BFGC: Tensor
    value_BFGC: Tensor
    weight_BGMRF: Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, width):
        ctx.save_for_backward(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR)
        ctx.width = width
        out_BRHC = torch.empty_like(query_BRHC, memory_format=torch.contiguous_format)
        for chunk in _chunks(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, width):
            out = torch.einsum("bgmrf,bfgc->brgmc", chunk.weight_BGMRF, chunk.value_BFGC)
            out_BRHC[:, chunk.rows] = out.flatten(2, 3)
        return out_BRHC

    @staticmethod
    def backward(ctx, grad_BRHC):
        with full_precision(grad_BRHC):
            return *_gradients(ctx.saved_tensors, ctx.width, grad_BRHC), None, None, None


def _gradients(inputs: Sequence[Tensor], width: int | None, grad_BRHC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR = inputs
    wide = at_least_float32(query_BRHC[:0]).dtype
    query_grad, key_grad, value_grad = (torch.zeros_like(x, dtype=wide) for x in (query_BRHC, key_BFGC, value_BFGC))
    for chunk in _chunks(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, width):
        grad = grad_BRHC[:, chunk.rows].to(wide).reshape(chunk.query_BRGMC.shape)
        weight_grad = torch.einsum("brgmc,bfgc->bgmrf", grad, chunk.value_BFGC)
        logit_grad = torch._softmax_backward_data(weight_grad, chunk.weight_BGMRF, -1, wide)
        query_grad[:, chunk.rows] = torch.einsum("bgmrf,bfgc->brgmc", logit_grad, chunk.key_BFGC).flatten(2, 3)
        key_grad[:, chunk.slots] += torch.einsum("bgmrf,brgmc->bfgc", logit_grad, chunk.query_BRGMC)
        value_grad[:, chunk.slots] += torch.einsum("bgmrf,brgmc->bfgc", chunk.weight_BGMRF, grad)
    query_grad *= query_BRHC.shape[-1] ** -0.5
    return query_grad.to(query_BRHC.dtype), key_grad.to(key_BFGC.dtype), value_grad.to(value_BFGC.dtype)


def _chunks(
    query_BRHC: Tensor, key_BFGC: Tensor, value_BFGC: Tensor, first_BR: Tensor, last_BR: Tensor, width: int | None
) -> Iterator[_Chunk]:
    """The rows in chunks, with the softmax over the slots that each chunk can see."""
    (batch, rows, heads, channels), (slots, groups) = query_BRHC.shape, key_BFGC.shape[1:3]
    size = max(1, scratch_elements(query_BRHC.device) // max(1, batch * heads * slots))
    size = size if width is None else max(width, 16)
    for start in range(0, rows, size):
        here = slice(start, min(start + size, rows))
        offset = slots - rows
        seen = slice(0, slots) if width is None else slice(max(0, offset + start - width + 1), offset + here.stop)
        query_BRGMC = at_least_float32(query_BRHC[:, here]).unflatten(2, (groups, -1)) * channels**-0.5
        key, value = at_least_float32(key_BFGC[:, seen]), at_least_float32(value_BFGC[:, seen])
        hidden_BRF = ~visible(first_BR[:, here], last_BR[:, here], seen)
        logit = torch.einsum("brgmc,bfgc->bgmrf", query_BRGMC, key)
        hidden = hidden_BRF[:, None, None]
        # A row that sees nothing has a softmax of NaN, filled with zeros like every weight of what is hidden.
        weight = logit.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0)
        yield _Chunk(here, seen, query_BRGMC, key, value, weight)
