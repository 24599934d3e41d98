"""Deterministic scatter-add: the gradient of entries that were gathered by a selection.

A place is an element of index_BRK, and the inverse of a selection lists the places that point at each slot. With atomic
additions, the sums would depend on the order of programs. Here the places are sorted by slot with a stable sort, and
added in this order. One program adds up to MOST places of a slot; a second kernel joins the sums of longer lists.

Layers that reuse a selection share its tensor. Inside `keeping`, the sorted places of the first KEPT chunks of rows are
cached while that tensor exists and is unchanged. All other chunks are sorted again by every layer.
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

KEPT = 8  # cached chunks per selection
MOST = 512  # places that one program adds: 128 KB for entries of 128 16-bit elements


class Inverse(NamedTuple):
    """The places of a flattened selection, sorted by slot and cut into parts of at most MOST places of one slot.

    Attributes:
        order: int32 [B*R*K], places sorted by slot and then by place; places without a slot are last.
        start: int32 [B*F + 1], where the places of each slot start in `order`.
        first: int32 [B*F + 1], number of the first part of each slot. A slot has ceil(places / MOST) parts.
        slot: int32 [parts], the slot of each part. The length is an upper bound; unused elements are B*F.
    """

    order: Tensor
    start: Tensor
    first: Tensor
    slot: Tensor


def inverse_index(index_BRK: Tensor, slots: int, part: Rows | None = None) -> Inverse:
    """Return the inverse of a selection, or of a chunk of it.

    Args:
        index_BRK: the selected slots; -1 is no slot.
        slots: F, the slots of each sequence.
        part: the chunk of rows; None: all rows. Places and slots are counted from the start of the chunk.
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
    """Add each row of `values` [B*R*K, X] to the row of its slot in `into` [B*F, X], float32 and contiguous."""
    from .inverse_kernels import add_parts, join_parts

    width, parts = values.shape[1], inverse.slot.numel()
    # 16 KB of float32 at a time, 32 elements for each of 128 threads, so that a popular slot has many loads in flight.
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

    Use it only for backward passes that Python calls: a compiled graph may write to a tensor without a new version.
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
    """Return the cached inverses of this tensor, for its current version and the current CUDA stream.

    Results of another stream may not be ready. During the capture of a CUDA graph nothing is cached, because a graph
    must not share results with calls outside of it.
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
