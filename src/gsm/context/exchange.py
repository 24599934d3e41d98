"""Tensors that the ranks of one sequence exchange, and their gradients, which go back the way they came.

The gradient of a received tensor belongs to the rank that has sent it. A state is passed from rank to rank
(``passed_on``, ``received``): its gradient comes back from the rank that the state went to. Where every rank is given
everything (``gathered``), gradients are summed for each owner (``scattered``) by whoever knows the owners.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsm.exchange import count_sent
from gsm_kernels.device import once

# PyTorch 2.13 has renamed both; the older names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the tensors of all ranks: [A, ...] on each of N ranks becomes [N A, ...].

    It has no gradient; use ``scattered`` for it.
    """
    out = x.new_empty(group.size() * len(x), *x.shape[1:])
    count_sent("gathered", x.nbytes * (group.size() - 1))
    _all_gather(out, x.contiguous(), group=group)
    return out


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum this rank's part [A, ...] of [N A, ...] over all ranks, the inverse of ``gathered``; without a gradient."""
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    count_sent("scattered", out.nbytes * (group.size() - 1))
    _reduce_scatter(out, x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over all ranks; without a gradient."""
    x = x.detach().clone()
    count_sent("summed", 2 * x.nbytes * (group.size() - 1) // group.size())  # bytes of a ring all-reduce
    dist.all_reduce(x, group=group)
    return x


def broadcast(x: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor of the rank ``source`` on all ranks; without a gradient."""
    x = x.detach().clone()
    count_sent("broadcast", x.nbytes if group.rank() == source else 0)
    dist.broadcast(x, group=group, group_src=source)
    return x


def received(like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Receive a tensor shaped like ``like`` from a rank of the group; its gradient goes back to that rank."""
    anchor = torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=torch.is_grad_enabled())
    return _Received.apply(anchor, like, source, group)


def passed_on(x: Tensor, beside: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
    """Send ``x`` to a rank of the group; return ``beside``, with a backward that receives the gradient of ``x``.

    ``beside`` is this rank's own output of the same computation, so that its backward waits at the right time.
    """
    return _PassedOn.apply(x, beside, target, group)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
        ctx.source, ctx.group = source, group
        out = torch.empty_like(like)
        dist.recv(out, group=group, group_src=source)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count_sent("received", grads[0].nbytes)
        dist.send(grads[0].contiguous(), group=ctx.group, group_dst=ctx.source)
        return grads[0].new_zeros(()), None, None, None


class _PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
        ctx.like, ctx.target, ctx.group = (x.shape, x.dtype, x.device), target, group
        count_sent("passed_on", x.nbytes)
        dist.send(x.contiguous(), group=group, group_dst=target)
        return beside.view_as(beside)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like
        grad = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(grad, group=ctx.group, group_src=ctx.target)
        return grad, grads[0], None, None
