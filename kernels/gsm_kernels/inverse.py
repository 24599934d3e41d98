"""Which places of a selection point at a slot, and sums over them: how gradients of gathered entries come together.

A gather's gradient is a scatter. With atomic additions its result depends on the order in which programs run; here the
places are sorted by slot once, stably, and added up in their order: by one program up to MOST of them, and those of a
slot that more rows have picked by several, whose sums another kernel adds.

Layers that reuse a selection hand on the tensor that lists it. So what a backward has sorted of a tensor is kept as
long as the tensor is there and unchanged, and the backwards of the other layers find it: chunk by chunk of its rows,
the first KEPT chunks that were sorted. Those of a backward that has more chunks than that are sorted again by every
layer, as are rows that are cut into other chunks, recomputed, or listed by another tensor.
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

KEPT = 8  # chunks of a selection: each keeps a few numbers for every slot
MOST = 512  # places that one program adds up: 128 KB of 128 numbers in 16 bits


class Inverse(NamedTuple):
    """The places of a flattened selection in the order of the slots they point at, and their parts.

    Attributes:
        order: int32 [B*R*K], places by slot and then by place; those that point at none come last.
        start: int32 [B*F + 1], where the places of each slot, of all sequences, begin in `order`.
        first: int32 [B*F + 1], the first part of each slot; one that MOST places point at has one part, one that none
            point at has none.
        slot: int32 [parts], of each part; B*F behind the last, since as many are allotted as there could be.
    """

    order: Tensor
    start: Tensor
    first: Tensor
    slot: Tensor


def inverse_index(index_BRK: Tensor, slots: int, part: Rows | None = None) -> Inverse:
    """The inverse of a chunk of a selection among `slots` slots a sequence, of all its rows if none is named; -1 points
    at none. Places are counted from the first of the chunk, and slots from the first of its sequences. Inside `keeping`
    it is sorted at the first call alone, if it is among the first KEPT chunks of its selection; else at each."""
    part = part or Rows(0, index_BRK.shape[0], 0, index_BRK.shape[1])
    known, key = _known_of(index_BRK), (slots, part)
    if key in known:
        return known[key]
    found = _sorted(index_BRK[part.batch0 :, part.row0 :][: part.batches, : part.rows], slots)
    if len(known) < KEPT:
        known[key] = found
    return found


def add_segments(into: Tensor, values: Tensor, inverse: Inverse) -> None:
    """Add to every slot's line of `into` [B*F, X], float32 and contiguous, the lines of `values` [B*R*K, X] of its
    places."""
    from .inverse_kernels import add_parts, join_parts

    width, parts = values.shape[1], inverse.slot.numel()
    # 16 KB of float32 at a time, 32 numbers in each of 128 threads: enough loads under way where a slot is popular.
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
    """Inside the block, what this thread sorts is kept. For backwards that Python itself has called: a compiled graph
    may put other numbers into a tensor without saying so."""
    before, _thread.keeps = getattr(_thread, "keeps", False), True
    try:
        yield
    finally:
        _thread.keeps = before


def forget() -> None:
    """Keep nothing of what was sorted, as if each selection were new."""
    _known.clear()


def _known_of(index_BRK: Tensor) -> dict[Hashable, Inverse]:
    """What was kept of this tensor as it is now. Of another stream, nothing: it may not be there yet. While a graph is
    captured nothing is kept: it would be read where it is not written, and the other way round."""
    if not getattr(_thread, "keeps", False) or index_BRK.is_inference():
        return {}
    now: Hashable = index_BRK._version
    if index_BRK.is_cuda:
        with torch.cuda.device(index_BRK.device):
            if torch.cuda.is_current_stream_capturing():
                return {}
            now = now, torch.cuda.current_stream().cuda_stream
    if index_BRK not in _known or _known[index_BRK][0] != now:
        _known[index_BRK] = now, {}
    return _known[index_BRK][1]


_thread = threading.local()
_known = WeakTensorKeyDictionary()  # by tensor: its version and stream, and what was sorted of it
