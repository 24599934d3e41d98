"""The inverse of a selection (the places that point at each slot), and sums over it: the gradient of gathered entries.

The gradient of a gather is a scatter. With atomic additions its result would depend on the order of programs. Here the
places are sorted by slot once, stably, and added in this order: up to MOST of them by one program, and more by several
programs, whose sums another kernel adds.

Layers that reuse a selection share its tensor. So the sorted places of a tensor are cached while the tensor exists and
is unchanged, for the backwards of the other layers: the first KEPT chunks of its rows. Further chunks are sorted again
by every layer, and so are rows that are cut into other chunks, recomputed, or in another tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .launch import cdiv, launch, power_of_two
from .rows import Rows

KEPT = 8  # cached chunks per selection; each has a few integers for every slot
MOST = 512  # places that one program adds: 128 KB for entries of 128 16-bit elements


class Inverse(NamedTuple):
    """The places of a flattened selection in the order of their slots, cut into parts.

    Attributes:
        order: int32 [B*R*K], places sorted by slot and then by place; places without a slot come last.
        start: int32 [B*F + 1], start of the places of each slot, of all sequences, in `order`.
        first: int32 [B*F + 1], the first part of each slot; a slot with 1 to MOST places has one part, an unused slot
            has none.
        slot: int32 [parts], the slot of each part; B*F after the last part, because the length is an upper bound.
    """

    order: Tensor
    start: Tensor
    first: Tensor
    slot: Tensor


def inverse_index(index_BRK: Tensor, slots: int, part: Rows | None = None) -> Inverse:
    """Return the inverse of a chunk of a selection, by default of all rows, among `slots` slots per sequence.

    -1 is no slot. Places are counted from the first of the chunk, and slots from the first of its sequences. Inside
    `keeping`, the first KEPT chunks of a selection are sorted once; all others are sorted at each call.
    """
    part = part or Rows(0, index_BRK.shape[0], 0, index_BRK.shape[1])
    cache, key = _cache_of(index_BRK), (slots, part)
    if key in cache:
        return cache[key]
    inverse = _sorted(index_BRK[part.batch0 :, part.row0 :][: part.batches, : part.rows], slots)
    if len(cache) < KEPT:
        cache[key] = inverse
    return inverse


def add_segments(into: Tensor, values: Tensor, inverse: Inverse) -> None:
    """Add the lines of `values` [B*R*K, X] to the lines of their slots in `into` [B*F, X], float32 and contiguous."""
    from .inverse_kernels import add_parts, join_parts

    width, parts = values.shape[1], inverse.slot.numel()
    # 16 KB of float32 at a time, 32 elements in each of 128 threads: enough concurrent loads for a popular slot.
    padded = power_of_two(width)
    sums = into.new_empty(parts, width)
    sizes = {"X": width, "WIDTH": padded, "LINES": max(4096 // padded, 1), "num_warps": 4}
    launch(add_parts, (parts,), values, *inverse, sums, into, into.shape[0], MOST=MOST, **sizes)
    launch(join_parts, (into.shape[0],), sums, inverse.first, into, **sizes)


def _sorted(index_BRK: Tensor, slots: int) -> Inverse:
    batch, device = index_BRK.shape[0], index_BRK.device
    count = batch * slots
    offset = torch.arange(batch, dtype=torch.int32, device=device)[:, None, None] * slots
    flat = torch.where(index_BRK < 0, count, index_BRK.to(torch.int32) + offset).flatten()
    ordered, order = torch.sort(flat, stable=True)
    line = torch.arange(count + 1, dtype=torch.int32, device=device)
    start = torch.searchsorted(ordered, line, out_int32=True)
    first = torch.zeros_like(start)
    torch.cumsum((start.diff() + (MOST - 1)) // MOST, 0, dtype=torch.int32, out=first[1:])
    part = torch.arange(count + cdiv(flat.numel(), MOST), dtype=torch.int32, device=device)
    return Inverse(order.to(torch.int32), start, first, torch.searchsorted(first[1:], part, out_int32=True, right=True))


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Cache the inverses that this thread computes inside the block.

    This is only for backwards called by Python: a compiled graph may change a tensor without changing its version.
    """
    before, _thread.keeps = getattr(_thread, "keeps", False), True
    try:
        yield
    finally:
        _thread.keeps = before


def forget() -> None:
    """Clear the cache."""
    _cache.clear()


def _cache_of(index_BRK: Tensor) -> dict[Hashable, Inverse]:
    """Return the cached inverses of this tensor in its current version and on the current stream.

    Results of another stream may not be ready. During the capture of a graph nothing is cached, because a graph must
    not read results from outside, or the reverse.
    """
    if not getattr(_thread, "keeps", False) or index_BRK.is_inference():
        return {}
    now: Hashable = index_BRK._version
    if index_BRK.is_cuda:
        with torch.cuda.device(index_BRK.device):
            if torch.cuda.is_current_stream_capturing():
                return {}
            now = now, torch.cuda.current_stream().cuda_stream
    if index_BRK not in _cache or _cache[index_BRK][0] != now:
        _cache[index_BRK] = now, {}
    return _cache[index_BRK][1]


_thread = threading.local()
_cache = WeakTensorKeyDictionary()  # by tensor: its version and stream, and its inverses
