"""Attention over a window and a selection on a CPU, by compiled loops.

Only the inputs are saved; backward computes the softmax again. Gradients of window and bank entries are summed within
parts of the rows, then over the parts. The parts do not depend on the number of threads.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..attend import attend as over_selection
from ..attend.inputs import LEARNED, Inputs
from ..attend_band import attend_band as over_band
from ..device import in_dtype
from ..dispatch import Impl
from ..register import register
from .native import loops, missing, places, run, unfit, wide

LANES = 32  # (query, head) pairs that are computed together; see `loops.attend`
THREAD = 1 << 20  # multiplications per thread, at least
PARTS, PART = 16, 256  # parts of a backward, at most, and rows per part, at least


class _Given(NamedTuple):
    """The first arguments of both loops, in order. Steps count elements, sizes bytes."""

    rows: int
    entries: int
    heads: int
    channels: int
    pairs: int
    width: int
    slots: int
    picks: int
    queries: int
    window_step: int
    window_size: int
    bank_step: int
    bank_size: int
    query: Tensor
    window: Tensor
    bank: Tensor | int
    index: Tensor | int
    bias: Tensor | int
    position: Tensor
    cos: Tensor
    sin: Tensor
    sink: Tensor

    @property
    def least(self) -> int:
        """Blocks of queries per thread, at least."""
        each = self.queries * self.heads * self.channels * (min(self.width, self.entries) + self.picks)
        return -(-THREAD // max(each, 1))


def _given(query, window, position, width, sink, cos, sin, bank, index, bias) -> _Given:
    _, rows, heads, channels = query.shape
    window, slots, picks, bank_step, bank_size, far = _entries(window), 0, 0, 0, 0, (0, 0, 0)
    if bank is not None and bank.shape[1] and index.shape[2]:
        bank, slots, picks = _entries(bank), bank.shape[1], index.shape[2]
        bank_step, bank_size = bank.stride(0), bank.element_size()
        far = (bank, places(index), 0 if bias is None else wide(bias))
    queries = max(1, min(LANES // heads, rows))
    return _Given(
        rows, window.shape[1], heads, channels, cos.shape[2], width, slots, picks, queries, window.stride(0),
        window.element_size(), bank_step, bank_size, wide(query), window, *far, places(position), wide(cos),
        wide(sin), wide(sink),
    )  # fmt: skip


def _entries(x: Tensor) -> Tensor:
    """Return entries in float32 or bfloat16, contiguous within a sequence. The loops read both dtypes and any distance
    between sequences, so that a cache is neither converted nor copied."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.to(torch.float32)
    _, step, last = x.stride()
    return x if last == 1 and step == x.shape[2] else x.contiguous()


def _forward(*arguments) -> Tensor:
    query, call = arguments[0], _given(*arguments)
    out = query.new_empty(query.shape, dtype=torch.float32)
    blocks = query.shape[0] * -(-call.rows // call.queries)
    run(loops("attend").forward, blocks, *call, out, least=call.least)
    return in_dtype(out, query.dtype)


def _backward(grad, *arguments):
    """Return the gradients of `Inputs.learned`, empty for a bank or bias that is None."""
    inputs, call = Inputs(*arguments), _given(*arguments)
    batch, channels, reach = len(grad), call.channels, min(call.width, call.entries) - 1
    parts = max(1, min(PARTS // max(batch, 1), call.rows // PART))
    rows = -(-call.rows // (parts * call.queries)) * call.queries
    parts, padded = -(-call.rows // max(rows, 1)), -(-channels // 16) * 16
    zeros = partial(grad.new_zeros, dtype=torch.float32)
    query_grad = grad.new_empty(grad.shape, dtype=torch.float32)
    window_parts = zeros((batch, parts, min(rows + reach, call.entries), padded))
    sink_parts, bank_parts = zeros((batch, parts, call.heads)), zeros((batch, parts, call.slots, padded))
    biased = call.picks and inputs.bias_BRK is not None
    bias_grad = zeros(0 if inputs.bias_BRK is None else inputs.bias_BRK.shape)
    written = (query_grad, window_parts, sink_parts, bank_parts, bias_grad if biased else 0)
    sizes, least = (parts, rows, window_parts.shape[2]), -(-call.least // max(rows // call.queries, 1))
    run(loops("attend").backward, batch * parts, *call, *sizes, wide(grad), *written, least=least)
    window_grad = zeros(inputs.window_BEC.shape)
    for part in range(parts):
        first = max(call.entries - call.rows + part * rows - reach, 0)
        into = window_grad[:, first : first + window_parts.shape[2]]
        into += window_parts[:, part, : into.shape[1], :channels]
    bank_grad = zeros(0 if inputs.bank_BFC is None else inputs.bank_BFC.shape)
    bank_grad = _sum(bank_parts)[..., :channels] if call.picks else bank_grad
    grads = (query_grad, window_grad, _sum(sink_parts).sum(0), bank_grad, bias_grad)
    pairs = zip(grads, inputs.learned, strict=True)
    return tuple([grad.new_empty(0) if like is None else x.to(like.dtype).contiguous() for x, like in pairs])


def _sum(parts: Tensor) -> Tensor:
    """Return the sum over the second dimension, in order."""
    total = parts[:, 0] if parts.shape[1] else parts.sum(1)
    for part in range(1, parts.shape[1]):
        total += parts[:, part]
    return total


_operator = register("attend", _forward, backward=_backward, takes=Inputs, learned=LEARNED, on_cpu=True)

for operation in (over_selection, over_band):
    operation.add(Impl("numba", lambda inputs: _operator(*inputs), unfit, missing))
