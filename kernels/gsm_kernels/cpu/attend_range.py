"""Attention of a few rows over ranges of slots on a CPU, by compiled loops, for decoding.

The loops read only the slots that a row sees, directly from the cache. So the cost grows with the number of filled
slots; with a mask it would grow with the capacity. Threads share the slots of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attend_range import attend_range as operation
from ..attend_range.reference import Inputs
from ..device import in_dtype
from ..dispatch import Impl
from ..inputs import learns
from ..register import register
from .native import loops, missing, places, run, unfit, wide

NARROW = "for a few rows that need no gradient, as in decoding"
ROWS = 8  # largest number of rows; each row reads the slots again, so more rows are faster as matrix products
THREAD = 1 << 18  # elements of keys and values per thread, at least
LINE = 16  # channels that are computed at once


def refuses(inputs: Inputs) -> str | None:
    """Return why the loops cannot take this call, or None."""
    query, key, value = inputs[:3]
    if query.shape[1] > ROWS:
        return f"is for at most {ROWS} rows, got {query.shape[1]}"
    if learns(query, key, value):
        return "has no gradient"
    if key.shape[3] % LINE:
        return f"needs a multiple of {LINE} channels, got {key.shape[3]}"
    if key.dtype is torch.float16 or value.dtype is not key.dtype:
        return f"reads keys and values in float32 or bfloat16, got {key.dtype} and {value.dtype}"
    return unfit(query, key, value)


def _forward(query, key, value, first, last, width=None, whole=False) -> Tensor:
    (batch, each, heads, channels), (_, slots, groups, _) = query.shape, key.shape
    module, queries, rows = loops("attend_range"), wide(query), batch * each
    key, value, first, last = *_side_by_side(key, value), places(first), places(last)
    # Divide all slots, instead of those that these rows see, so that a recorded call can be repeated with other ranges.
    shares = min(-(-slots // module.PART), module.SHARES)
    items, out = shares * rows, torch.empty_like(queries)
    part = queries.new_empty(items * heads * (channels + 2))
    least = -(-THREAD * items // max(2 * groups * channels * rows * slots, 1))
    sizes = (rows, shares, each, slots, heads, groups, channels, key.element_size(), *key.stride()[:2])
    run(module.forward, items, *sizes, queries, key, value, first, last, part, out, least=max(least, 1))
    if items > least:  # a single part has combined its shares already
        run(module.combine, rows, rows, shares, heads, channels, part, out, least=max(rows, 1))
    return in_dtype(out, query.dtype)


def _side_by_side(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with contiguous heads and channels, and the same strides of slots and sequences."""
    strides = key.stride()
    if strides == value.stride() and strides[2:] == (key.shape[3], 1):
        return key, value
    return key.contiguous(), value.contiguous()


_operator = register("attend_range", _forward, takes=Inputs, on_cpu=True)

operation.add(Impl("numba", lambda inputs: _operator(*inputs), refuses, missing, narrow=NARROW), before="sdpa")
