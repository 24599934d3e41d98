"""Plain PyTorch attention over ranges of slots, in chunks of rows, with a hand-written backward.

Nothing but the inputs is kept for backward, which computes the softmax of each chunk again: no tensor of all rows and
slots is ever made. M counts the query heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision, once, scratch_elements
from ..inputs import gradients, keep, kept
from ..rows import slices
from ..slots import visible
from .inputs import Inputs


def attend_range(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_range`."""
    return _Attention.apply(*inputs)


class _Chunk(NamedTuple):
    """Some rows, the slots that they can see, and their softmax."""

    rows: slice
    slots: slice
    query_BRGMC: Tensor
    key_BFGC: Tensor
    value_BFGC: Tensor
    weight_BGMRF: Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        inputs = Inputs(*arguments)
        keep(ctx, inputs)
        out_BRHC = torch.empty_like(inputs.query_BRHC, memory_format=torch.contiguous_format)
        for chunk in _chunks(inputs):
            out = torch.einsum("bgmrf,bfgc->brgmc", chunk.weight_BGMRF, chunk.value_BFGC)
            out_BRHC[:, chunk.rows] = out.flatten(2, 3)
        return out_BRHC

    @staticmethod
    @once
    def backward(ctx, grad_BRHC):
        (inputs,) = kept(ctx, Inputs)
        with full_precision(grad_BRHC):
            query, key, value = _gradients(inputs, grad_BRHC)
        return gradients(Inputs, query_BRHC=query, key_BFGC=key, value_BFGC=value)


def _gradients(inputs: Inputs, grad_BRHC: Tensor) -> Iterator[Tensor]:
    """Return the gradients of queries, keys and values."""
    wide = at_least_float32(inputs.query_BRHC[:0]).dtype
    query_grad, key_grad, value_grad = grads = [torch.zeros_like(x, dtype=wide) for x in inputs[:3]]
    for chunk in _chunks(inputs):
        grad = grad_BRHC[:, chunk.rows].to(wide).reshape(chunk.query_BRGMC.shape)
        weight_grad = torch.einsum("brgmc,bfgc->bgmrf", grad, chunk.value_BFGC)
        logit_grad = torch._softmax_backward_data(weight_grad, chunk.weight_BGMRF, -1, wide)
        query_grad[:, chunk.rows] = torch.einsum("bgmrf,bfgc->brgmc", logit_grad, chunk.key_BFGC).flatten(2, 3)
        key_grad[:, chunk.slots] += torch.einsum("bgmrf,brgmc->bfgc", logit_grad, chunk.query_BRGMC)
        value_grad[:, chunk.slots] += torch.einsum("bgmrf,brgmc->bfgc", chunk.weight_BGMRF, grad)
    query_grad *= inputs.query_BRHC.shape[-1] ** -0.5
    return (grad.to(x.dtype) for grad, x in zip(grads, inputs[:3], strict=True))


def _chunks(inputs: Inputs) -> Iterator[_Chunk]:
    """Yield the rows in chunks, with the softmax over the slots that each chunk can see."""
    (batch, rows, heads, channels), (slots, groups) = inputs.query_BRHC.shape, inputs.key_BFGC.shape[1:3]
    width, offset = inputs.width, slots - rows
    size = max(1, scratch_elements(inputs.query_BRHC.device) // max(1, batch * heads * slots))
    for part in slices(rows, size if width is None else max(width, 16)):
        seen = slice(0, slots)
        if width is not None:
            seen = slice(max(0, offset + part.start - width + 1), offset + part.stop)
        query_BRGMC = at_least_float32(inputs.query_BRHC[:, part]).unflatten(2, (groups, -1)) * channels**-0.5
        key, value = at_least_float32(inputs.key_BFGC[:, seen]), at_least_float32(inputs.value_BFGC[:, seen])
        hidden = ~visible(inputs.first_BR[:, part], inputs.last_BR[:, part], seen)[:, None, None]
        logit = torch.einsum("brgmc,bfgc->bgmrf", query_BRGMC, key)
        # A row that sees nothing has a softmax of NaN, which is replaced by zeros like all weights of hidden slots.
        weight = logit.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0)
        yield _Chunk(part, seen, query_BRGMC, key, value, weight)
