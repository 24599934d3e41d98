"""Which places of a selection point at a slot, and sums over them: how gradients of gathered entries come together.

A gather's gradient is a scatter. With atomic additions its result depends on the order in which programs run; here the
places are sorted by slot once, stably, and every slot's own program adds up its places in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .launch import launch, power_of_two


class Inverse(NamedTuple):
    """The places of a flattened selection in the order of the slots they point at.

    Attributes:
        order: int64 [B*R*K], places by slot and then by place; those that point at none come last.
        start: int64 [B*F + 1], where the places of each slot, of all sequences, begin in `order`.
    """

    order: Tensor
    start: Tensor


def inverse_index(index_BRK: Tensor, slots: int) -> Inverse:
    """The inverse of a selection among `slots` slots a sequence; -1 points at none."""
    batch = index_BRK.shape[0]
    offset = torch.arange(batch, dtype=torch.int32, device=index_BRK.device)[:, None, None] * slots
    flat = torch.where(index_BRK < 0, batch * slots, index_BRK.to(torch.int32) + offset).flatten()
    ordered, order = torch.sort(flat, stable=True)
    ends = torch.arange(batch * slots + 1, dtype=torch.int32, device=index_BRK.device)
    return Inverse(order, torch.searchsorted(ordered, ends))


def add_segments(into: Tensor, values: Tensor, inverse: Inverse) -> None:
    """Add to every slot's line of `into` [B*F, X], float32 and contiguous, the lines of `values` [B*R*K, X] of its
    places."""
    from .inverse_kernels import add_segments as kernel

    width = values.shape[1]
    # 16 KB of float32 at a time, 32 numbers in each of 128 threads: enough loads under way where a slot is popular.
    padded = power_of_two(width)
    sizes = {"X": width, "WIDTH": padded, "PLACES": max(4096 // padded, 1), "num_warps": 4}
    launch(kernel, (into.shape[0],), values, *inverse, into, **sizes)
