"""A feed-forward of many experts, of which each row meets a few: the mixture of experts of DeepSeek-V4.1, dropless.

    s_e   = sqrt(softplus(x . w_e))                                          score of an expert
    T     = the K experts with the highest s_e + b_e                         b_e decides about this alone
    y     = shared(x) + sum_{e in T} scale s_e / (sum_{T} s) expert_e(x)

N rows of all sequences, E experts, K that a row is sent to, M = N K pairs of a row and an expert, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gsm.costs.primitives import ProductCost, products
from gsm.exchange import routed
from gsm.layers.feed_forward import Balance, Fed, SwiGLU
from gsm.layers.linear import INTO_RESIDUAL, Linear, draw
from gsm.shapes import lowered, promoted
from gsm_kernels import grouped_linear, swiglu
from gsm_kernels.device import full_precision

TINY = 1e-20  # keeps the slope of a root finite, and a quotient


class MixtureOfExperts(nn.Module):
    """Routed experts, and one that all rows meet.

    Each is as wide as makes a row meet ``hidden_dim`` channels in all: a dense feed-forward of that width has the same
    number of active weights.

    Loads are evened out in two ways (DeepSeek-V3; DeepSeek-V4.1, section 4.2.2). After every optimiser step
    ``rebalance`` raises b_e by ``bias_step`` where expert e had fewer rows than the mean, and lowers it where it had
    more; no gradient reaches it. And there is a small loss, the mean over sequences of sum_e f_e P_e, where f_e is
    E / K times the share of a sequence's rows that were sent to e, and P_e their mean of s_e / sum s: 1 when all is
    even. A sequence is a row of the batch, with whatever documents are packed in it.

    Args:
        dim: model width.
        hidden_dim: width of all experts together that a row meets; K + 1 must divide it.
        experts: routed experts (E).
        chosen: routed experts that a row is sent to (K).
        route_scale: sum of a row's weights of routed experts.
        bias_step: what one step changes a bias by.
        balance_weight: weight of the loss; 0 for none.
        limit: clamp of both branches, as in ``SwiGLU``.

    Raises:
        ValueError: for numbers of experts that cannot be, or do not divide the width.
    """

    nudges_E: Tensor

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        experts: int,
        chosen: int,
        route_scale: float = 1.5,
        bias_step: float = 0.001,
        balance_weight: float = 1e-4,
        limit: float = 10.0,
    ):
        super().__init__()
        if not 1 <= chosen <= experts:
            raise ValueError(f"chosen must lie between 1 and the {experts} experts, got {chosen}")
        width, rest = divmod(hidden_dim, chosen + 1)
        if rest:
            raise ValueError(
                f"chosen + 1 = {chosen + 1} experts that a row meets must divide feed_forward_dim {hidden_dim}"
            )
        self.chosen, self.route_scale, self.balance_weight = chosen, route_scale, balance_weight
        self.bias_step = bias_step
        self.router = Router(dim, experts)
        self.experts = Experts(dim, width, experts, limit)
        self.shared = SwiGLU(dim, width, limit=limit)
        # How often b_e was raised less how often lowered: a whole number survives a cast of the model to bfloat16,
        # in which steps of 0.001 would be lost.
        self.register_buffer("nudges_E", torch.zeros(experts, dtype=torch.int64))

    def forward(self, x_BRD: Tensor, position_BR: Tensor | None = None) -> Fed:
        """Maps [B, R, D] to [B, R, D]; in training also tells how even the loads were, padding (-1) left out."""
        score_BRE = self.router(x_BRD)
        bias_E = self.bias_step * self.nudges_E.to(score_BRE.dtype)
        chosen_BRK = (score_BRE + bias_E).topk(self.chosen).indices
        kept_BRK = score_BRE.gather(-1, chosen_BRK)
        weight_BRK = self.route_scale * kept_BRK / (kept_BRK.sum(-1, keepdim=True) + TINY)
        routed_ND = self.experts(*(x.flatten(0, -2) for x in (x_BRD, chosen_BRK, weight_BRK)))
        update_BRD = self.shared(x_BRD).update_BRD + routed_ND.view(x_BRD.shape)
        if not self.training:
            return Fed(update_BRD)
        counts_BR = torch.ones_like(chosen_BRK[..., 0]) if position_BR is None else position_BR >= 0
        return Fed(update_BRD, self._balance(score_BRE, chosen_BRK, counts_BR))

    @torch.no_grad()
    def rebalance(self, load_E: Tensor) -> None:
        """Moves every bias one step towards even loads; ``load_E`` is int64, the rows of a whole optimiser step."""
        self.nudges_E += torch.sign(load_E.sum() - load_E.numel() * load_E)

    def products(self) -> ProductCost:
        """What it costs: the router, the shared expert, and K of the others, each reading and writing its own rows."""
        every = products(self.experts)
        each = self.chosen * every.weights // self.nudges_E.numel()
        dim, width = self.experts.down.shape[1:]
        moved = 3 * self.chosen * (dim + width)
        return products(self.router, self.shared) + ProductCost(each, moved, every.weights, every.weights, each)

    def unmet(self) -> int:
        """Weights of the experts that a row is not sent to."""
        each = sum(p[0].numel() for p in self.experts.parameters())
        return (self.nudges_E.numel() - self.chosen) * each

    def _balance(self, score_BRE: Tensor, chosen_BRK: Tensor, counts_BR: Tensor) -> Balance:
        """What was sent where, of the rows that count."""
        counts_BR1 = counts_BR[..., None].to(score_BRE.dtype)
        sent_BRE = torch.zeros_like(score_BRE).scatter(-1, chosen_BRK, counts_BR1.expand(-1, -1, self.chosen))
        share_BRE = counts_BR1 * score_BRE / (score_BRE.sum(-1, keepdim=True) + TINY)
        rows_B = counts_BR1.sum((1, 2))
        return Balance(sent_BRE.sum(1), share_BRE.sum(1), rows_B, self.chosen, self.balance_weight)


class Router(Linear):
    """Scores of all experts, sqrt(softplus(x W^T)), in at least float32.

    Args:
        dim_in: model width.
        dim_out: experts.
    """

    def forward(self, x_BRD: Tensor) -> Tensor:
        """[B, R, E]"""
        with full_precision(x_BRD):
            logit_BRE = F.linear(promoted(x_BRD), promoted(self.weight))
            return (F.softplus(logit_BRE) + TINY).sqrt()


class Experts(nn.Module):
    """SwiGLUs side by side, each with the rows that are sent to it: all of them, however many.

    Rows are sorted by expert, so that the products of all experts are one grouped product; its shape does not depend
    on where the rows are sent.

    Args:
        dim: model width.
        width: of each expert (F).
        experts: how many (E).
        limit: clamp of both branches.
    """

    def __init__(self, dim: int, width: int, experts: int, limit: float):
        super().__init__()
        self.limit, self.experts = limit, experts
        self.group: dist.ProcessGroup | None = None  # ranks that have a share of the experts each; None: all are here
        self.gate = nn.Parameter(torch.empty(experts, width, dim))
        self.up = nn.Parameter(torch.empty(experts, width, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, width))
        draw(self.gate, dim**-0.5)
        draw(self.up, dim**-0.5)
        draw(self.down, INTO_RESIDUAL * width**-0.5)

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """sum_k weight_nk expert_{chosen_nk}(x_n), [N, D].

        The weight goes to the narrow product in the middle, which is cheaper than weighting [M, D].
        """
        x_ND = lowered(x_ND)
        expert_M, order_M = chosen_NK.flatten().sort(stable=True)
        place_M = torch.zeros_like(order_M).scatter(0, order_M, torch.arange(len(order_M), device=order_M.device))
        x_MD = _Spread.apply(x_ND, order_M, place_M)
        weight_M1 = _Spread.apply(weight_NK.reshape(-1, 1), order_M, place_M)
        if self.group is None:
            y_MD = self.compute(x_MD, weight_M1, expert_M)
        else:
            y_MD = self.send(x_MD, weight_M1, expert_M, self.group)
        return _Gather.apply(y_MD, order_M, place_M, x_ND.shape[0])

    def compute(self, x_MD: Tensor, weight_M1: Tensor, expert_M: Tensor) -> Tensor:
        """weight_m expert_m(x_m), for rows that are sorted by expert."""
        gate, up, down = (self.here(weight).to(x_MD.dtype) for weight in (self.gate, self.up, self.down))
        index = torch.arange(len(gate), device=expert_M.device)
        end_E = torch.searchsorted(expert_M, index, right=True, out_int32=True)
        hidden_MF = swiglu(grouped_linear(x_MD, gate, end_E), grouped_linear(x_MD, up, end_E), self.limit)
        return grouped_linear((hidden_MF * weight_M1).to(hidden_MF.dtype), down, end_E)

    def here(self, weight: Tensor) -> Tensor:
        """The experts that this rank has. Rows of all ranks of the group come to them, whose losses are averaged, so
        that their gradient is divided by the number of ranks; that of other weights is averaged by whoever trains."""
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        return weight if self.group is None else _Divided.apply(weight, self.group.size())

    def send(self, x_MD: Tensor, weight_M1: Tensor, expert_M: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The same where each rank of a group has its share of the experts: rows travel to their experts and back. How
        many go where, the host has to know: it waits for the device."""
        index_E = torch.arange(self.experts, device=expert_M.device)
        count_E = torch.searchsorted(expert_M, index_E, right=True).diff(prepend=index_E.new_zeros(1))
        ranks, own = group.size(), self.experts // group.size()
        came_NE = routed(count_E, [own] * ranks, [own] * ranks, group).view(ranks, own)  # from each rank, to each here
        sent, got = torch.stack([count_E.view(ranks, own).sum(1), came_NE.sum(1)]).tolist()
        here_M = torch.arange(own, device=expert_M.device).repeat(ranks).repeat_interleave(came_NE.flatten())
        here_M, order_M = here_M.sort(stable=True)
        place_M = torch.zeros_like(order_M).scatter(0, order_M, torch.arange(len(order_M), device=order_M.device))
        x_MD, weight_M1 = (routed(x, sent, got, group) for x in (x_MD, weight_M1))
        y_MD = self.compute(
            _Permuted.apply(x_MD, order_M, place_M), _Permuted.apply(weight_M1, order_M, place_M), here_M
        )
        return routed(_Permuted.apply(y_MD, place_M, order_M), got, sent, group)


def ways_to_divide(parts: Sequence[Experts], ranks: int) -> list[int]:
    """Among how many neighbours of so many ranks the experts of all these layers can be divided; 1 is always there, and
    means undivided.

    Each neighbour has equally many experts, and ranks that have the same ones divide the widths of their weights.
    """
    counts, widths = [part.experts for part in parts], width_of_weights(parts)

    def fits(n: int) -> bool:
        return all(count % n == 0 for count in (ranks, *counts)) and all(x % (ranks // n) == 0 for x in widths)

    return [1, *(n for n in range(2, min([ranks, *counts]) + 1 if parts else 0) if fits(n))]


def width_of_weights(parts: Sequence[Experts]) -> list[int]:
    """What ranks that have the same experts divide of them, all different ones in order."""
    return sorted({weight.shape[1] for part in parts for weight in part.parameters()})


def _spread(x_ND: Tensor, order_M: Tensor) -> Tensor:
    """A copy of each row for each of its experts, sorted by expert."""
    return x_ND[order_M // (order_M.shape[0] // x_ND.shape[0])]


def _gather(y_MD: Tensor, place_M: Tensor, rows: int) -> Tensor:
    """The sum of each row's copies."""
    return y_MD[place_M].unflatten(0, (rows, -1)).sum(1)


class _Spread(torch.autograd.Function):
    """``_spread``, whose gradient is ``_gather``: PyTorch's own would sort again, or add in any order."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(place_M)
        ctx.rows = x_ND.shape[0]
        return _spread(x_ND, order_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place_M,) = ctx.saved_tensors
        return _gather(grads[0], place_M, ctx.rows), None, None


class _Divided(torch.autograd.Function):
    """The same numbers, and of their gradient a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] / ctx.parts, None


class _Permuted(torch.autograd.Function):
    """Rows in another order, and the gradient in the old one; ``place_M`` is the inverse of ``order_M``."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(place_M)
        return x_MD[order_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place_M,) = ctx.saved_tensors
        return grads[0][place_M], None, None


class _Gather(torch.autograd.Function):
    """``_gather``, whose gradient is ``_spread``."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, order_M: Tensor, place_M: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(order_M)
        return _gather(y_MD, place_M, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order_M,) = ctx.saved_tensors
        return _spread(grads[0], order_M), None, None, None
