"""Tensors that ranks exchange, and their gradients, which go back the way they came.

The gradient of what a rank has received belongs to whoever has sent it: where rows are sent around (``routed``), it
travels back; where a state is passed on from rank to rank (``received``, ``passed_on``), it comes from the rank that
the state went to; where all are given everything (``gathered``), gradients are summed for each owner (``scattered``) by
whoever knows what is whose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 has renamed both; the older names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Bytes that this rank has sent to others since somebody has begun to count, by what sent them.
_tallies: list[Counter[str]] = []


@contextmanager
def tallied() -> Iterator[Counter[str]]:
    """Counts the bytes that this rank sends to others inside the block, forward and backward, by the name of what sends
    them: ``gathered``, ``scattered``, ``routed``, ``passed_on``, ``received`` (gradients), ``summed``, ``told``."""
    tally: Counter[str] = Counter()
    _tallies.append(tally)
    try:
        yield tally
    finally:
        _tallies.remove(tally)


def _count(name: str, bytes_sent: int) -> None:
    for tally in _tallies:
        tally[name] += bytes_sent


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, one after the other: [A, ...] of each of N ranks as [N A, ...]; without a gradient,
    which would be ``scattered``."""
    out = x.new_empty(group.size() * len(x), *x.shape[1:])
    _count("gathered", x.nbytes * (group.size() - 1))
    _all_gather(out, x.contiguous(), group=group)
    return out


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The opposite: of [N A, ...] the sum over ranks of this rank's [A, ...]; without a gradient."""
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    _count("scattered", out.nbytes * (group.size() - 1))
    _reduce_scatter(out, x.contiguous(), group=group)
    return out


def routed(x: Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends rows to ranks.

    Args:
        x: rows, those for rank 0 first.
        sent: how many of them go to each rank.
        got: how many come from each rank.

    Returns:
        what has come, that of rank 0 first.
    """
    return _Routed.apply(x, list(sent), list(got), group)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks; without a gradient."""
    x = x.detach().clone()
    _count("summed", 2 * x.nbytes * (group.size() - 1) // group.size())  # as a ring does it
    dist.all_reduce(x, group=group)
    return x


def told(x: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """What one rank of the group has, on all of them; without a gradient."""
    x = x.detach().clone()
    _count("told", x.nbytes if group.rank() == source else 0)
    dist.broadcast(x, group=group, group_src=source)
    return x


def received(like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """A tensor as ``like`` from a rank of the group, to which its gradient goes back."""
    anchor = torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=torch.is_grad_enabled())
    return _Received.apply(anchor, like, source, group)


def passed_on(x: Tensor, beside: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
    """Sends ``x`` to a rank of the group; returns ``beside``, in whose backward the gradient of ``x`` is waited for.

    ``beside`` is what this rank itself makes of the same computation, so that the wait comes when its turn has come.
    """
    return _PassedOn.apply(x, beside, target, group)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = (sent, got), group
        return _route(x, sent, got, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, got = ctx.splits
        return _route(grads[0], got, sent, ctx.group), None, None, None


def _route(x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    _count("routed", (sum(sent) - sent[group.rank()]) * x[:1].nbytes if len(x) else 0)
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
    return out


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
        ctx.source, ctx.group = source, group
        out = torch.empty_like(like)
        dist.recv(out, group=group, group_src=source)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _count("received", grads[0].nbytes)
        dist.send(grads[0].contiguous(), group=ctx.group, group_dst=ctx.source)
        return grads[0].new_zeros(()), None, None, None


class _PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
        ctx.like, ctx.target, ctx.group = (x.shape, x.dtype, x.device), target, group
        _count("passed_on", x.nbytes)
        dist.send(x.contiguous(), group=group, group_dst=target)
        return beside.view_as(beside)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like
        grad = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(grad, group=ctx.group, group_src=ctx.target)
        return grad, grads[0], None, None
