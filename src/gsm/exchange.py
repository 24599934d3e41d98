"""Rows that ranks send each other, with gradients in the opposite direction, and a count of the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsm_kernels.device import once

# Open counts of the bytes that this rank has sent, by function.
_tallies: list[Counter[str]] = []


@contextmanager
def tallied() -> Iterator[Counter[str]]:
    """Count the bytes that this rank sends inside the block, forward and backward, by the sending function:
    ``gathered``, ``scattered``, ``routed``, ``passed_on``, ``received`` (gradients), ``summed``, ``broadcast``."""
    tally: Counter[str] = Counter()
    _tallies.append(tally)
    try:
        yield tally
    finally:
        _tallies.remove(tally)


def count_sent(name: str, bytes_sent: int) -> None:
    """Add bytes to all open counts."""
    for tally in _tallies:
        tally[name] += bytes_sent


def routed(x: Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to ranks.

    Args:
        x: rows, ordered by target rank.
        sent: number of rows for each rank.
        got: number of rows from each rank.

    Returns:
        The received rows, ordered by source rank.
    """
    return _Routed.apply(x, list(sent), list(got), group)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = (sent, got), group
        return _route(x, sent, got, group)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, got = ctx.splits
        return _route(grads[0], got, sent, ctx.group), None, None, None


def _route(x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    count_sent("routed", (sum(sent) - sent[group.rank()]) * x[:1].nbytes if len(x) else 0)
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
    return out
