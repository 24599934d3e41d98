"""A mixture of experts without dropped tokens, as in DeepSeek-V4.1: each row is routed to a few of many experts.

    s_e   = sqrt(softplus(x . w_e))                                          score of an expert
    T     = the K experts with the highest s_e + b_e                         b_e affects only this choice
    y     = shared(x) + sum_{e in T} scale s_e / (sum_{T} s) expert_e(x)     for K = 1 without the division

N rows of all sequences, E experts, K experts per row, M = N K pairs of a row and an expert, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gsm.errors import within
from gsm.exchange import routed
from gsm.layers.costs import ProductCost, products
from gsm.layers.feed_forward import Balance, Fed, SwiGLU
from gsm.layers.grouped_linear import grouped_linear
from gsm.layers.linear import INTO_RESIDUAL, Linear, draw
from gsm.shapes import lowered, promoted
from gsm_kernels import swiglu
from gsm_kernels.device import full_precision

TINY = 1e-20  # added so that the gradient of a square root, and a quotient, are finite


class MixtureOfExperts(nn.Module):
    """Routed experts, and a shared expert for all rows.

    The width of an expert is ``hidden_dim`` / (K + 1), so a row uses ``hidden_dim`` channels in total, and the number
    of active weights is that of a dense feed-forward of width ``hidden_dim``.

    Loads are balanced in two ways (DeepSeek-V3; DeepSeek-V4.1, section 4.2.2). After every optimiser step ``rebalance``
    raises b_e by ``bias_step`` if expert e got fewer rows than the mean, and lowers it if it got more; b_e has no
    gradient. In addition there is a small loss, the mean over sequences of sum_e f_e P_e. Here f_e is E / K times the
    fraction of a sequence's rows that are routed to e, and P_e is the mean of s_e / sum s over all its rows; the sum is
    1 for even loads. A sequence is a row of the batch with all documents packed in it.

    Args:
        dim: model width (D).
        hidden_dim: sum of the widths of the experts that a row uses; a multiple of K + 1.
        experts: number of routed experts (E).
        chosen: number of routed experts per row (K).
        route_scale: sum of the weights of a row's routed experts, for K of at least 2.
        bias_step: change of a bias per optimiser step.
        balance_weight: weight of the loss; 0: no loss.
        limit: clamp of both branches, as in ``SwiGLU``.

    Raises:
        ValueError: if a number of experts is invalid, or ``hidden_dim`` is not a multiple of K + 1.
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
            raise ValueError(f"chosen must be in [1, {experts}], the number of experts, got {chosen}")
        within(0, route_scale=route_scale, bias_step=bias_step, balance_weight=balance_weight)
        width, rest = divmod(hidden_dim, chosen + 1)
        if rest:
            raise ValueError(
                f"feed_forward_dim must be a multiple of {chosen + 1}, the number of experts of a row (chosen + 1), "
                f"got {hidden_dim}"
            )
        self.chosen, self.route_scale, self.balance_weight = chosen, route_scale, balance_weight
        self.bias_step = bias_step
        self.router = Router(dim, experts)
        self.experts = Experts(dim, width, experts, limit)
        self.shared = SwiGLU(dim, width, limit=limit)
        # How often b_e was raised minus how often it was lowered. An integer survives a cast of the model to bfloat16,
        # in which steps of 0.001 would be lost.
        self.register_buffer("nudges_E", torch.zeros(experts, dtype=torch.int64))

    def forward(self, x_BRD: Tensor, position_BR: Tensor | None = None) -> Fed:
        """Map [B, R, D] to [B, R, D]; in training also return the loads, without padding (position -1)."""
        score_BRE = self.router(x_BRD)
        bias_E = self.bias_step * self.nudges_E.to(score_BRE.dtype)
        chosen_BRK = (score_BRE + bias_E).topk(self.chosen).indices
        score_BRK = score_BRE.gather(-1, chosen_BRK)
        weight_BRK = self.route_scale * score_BRK
        if self.chosen > 1:  # for one expert the quotient would be constant, and the router would not learn
            weight_BRK = weight_BRK / (score_BRK.sum(-1, keepdim=True) + TINY)
        routed_ND = self.experts(*(x.flatten(0, -2) for x in (x_BRD, chosen_BRK, weight_BRK)))
        update_BRD = self.shared(x_BRD).update_BRD + routed_ND.view(x_BRD.shape)
        if not self.training:
            return Fed(update_BRD)
        counts_BR = torch.ones_like(chosen_BRK[..., 0]) if position_BR is None else position_BR >= 0
        return Fed(update_BRD, self._balance(score_BRE, chosen_BRK, counts_BR))

    @torch.no_grad()
    def rebalance(self, load_E: Tensor) -> None:
        """Move every bias one step towards even loads; ``load_E``, int64, counts the rows of an optimiser step."""
        self.nudges_E += torch.sign(load_E.sum() - load_E.numel() * load_E)

    def products(self) -> ProductCost:
        """Return the cost of the router, the shared expert and K routed experts per row."""
        every = products(self.experts)
        each = self.chosen * every.weights // self.nudges_E.numel()
        dim, width = self.experts.down.shape[1:]
        moved = 3 * self.chosen * (dim + width)
        return products(self.router, self.shared) + ProductCost(each, moved, every.weights, every.weights, each)

    def inactive_weights(self) -> int:
        """Return the number of weights of the experts that a row is not routed to."""
        each = sum(p[0].numel() for p in self.experts.parameters())
        return (self.nudges_E.numel() - self.chosen) * each

    def _balance(self, score_BRE: Tensor, chosen_BRK: Tensor, counts_BR: Tensor) -> Balance:
        """Return the loads, counting all rows except padding."""
        counts_BR1 = counts_BR[..., None].to(score_BRE.dtype)
        sent_BRE = torch.zeros_like(score_BRE).scatter(-1, chosen_BRK, counts_BR1.expand(-1, -1, self.chosen))
        share_BRE = counts_BR1 * score_BRE / (score_BRE.sum(-1, keepdim=True) + TINY)
        rows_B = counts_BR1.sum((1, 2))
        return Balance(sent_BRE.sum(1), share_BRE.sum(1), rows_B, self.chosen, self.balance_weight)


class Router(Linear):
    """The router: scores of all experts, sqrt(softplus(x W^T)), in at least float32.

    Args:
        dim_in: model width.
        dim_out: number of experts (E).
    """

    def forward(self, x_BRD: Tensor) -> Tensor:
        """Return the scores, [B, R, E]."""
        with full_precision(x_BRD):
            logit_BRE = F.linear(promoted(x_BRD), promoted(self.weight))
            return (F.softplus(logit_BRE) + TINY).sqrt()


class Experts(nn.Module):
    """The routed experts, each a SwiGLU. Each processes all rows routed to it, without a capacity limit.

    Rows are sorted by expert, so that the products of all experts are one grouped product, whose shape is independent
    of the routing.

    Args:
        dim: model width.
        width: width of each expert (F).
        experts: number of experts (E).
        limit: clamp of both branches.
    """

    def __init__(self, dim: int, width: int, experts: int, limit: float):
        super().__init__()
        self.limit, self.experts = limit, experts
        self.group: dist.ProcessGroup | None = None  # the ranks that share the experts; None: all experts are local
        self.gate = nn.Parameter(torch.empty(experts, width, dim))
        self.up = nn.Parameter(torch.empty(experts, width, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, width))
        draw(self.gate, dim**-0.5)
        draw(self.up, dim**-0.5)
        draw(self.down, INTO_RESIDUAL * width**-0.5)

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """Return sum_k weight_nk expert_{chosen_nk}(x_n), [N, D].

        The weight multiplies the hidden activations, [M, F], which is cheaper than the outputs, [M, D].
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
        """Return weight_m expert_m(x_m), for rows sorted by expert."""
        gate, up, down = (self.local(weight).to(x_MD.dtype) for weight in (self.gate, self.up, self.down))
        index = torch.arange(len(gate), device=expert_M.device)
        end_E = torch.searchsorted(expert_M, index, right=True, out_int32=True)
        hidden_MF = swiglu(grouped_linear(x_MD, gate, end_E), grouped_linear(x_MD, up, end_E), self.limit)
        return grouped_linear((hidden_MF * weight_M1).to(hidden_MF.dtype), down, end_E)

    def local(self, weight: Tensor) -> Tensor:
        """Return the weights of this rank's experts.

        Their gradient is divided by the number of ranks in the group, because it is the sum over the rows of all these
        ranks, whose losses are averaged. For all other weights, the trainer averages the gradients.
        """
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        return weight if self.group is None else _Divided.apply(weight, self.group.size())

    def send(self, x_MD: Tensor, weight_M1: Tensor, expert_M: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return weight_m expert_m(x_m) for experts on several ranks: send rows to their experts, and results back.

        Synchronises with the device, because the host must know the numbers of rows.
        """
        index_E = torch.arange(self.experts, device=expert_M.device)
        count_E = torch.searchsorted(expert_M, index_E, right=True).diff(prepend=index_E.new_zeros(1))
        ranks, local = group.size(), self.experts // group.size()
        # Rows from each rank for each local expert.
        received_NE = routed(count_E, [local] * ranks, [local] * ranks, group).view(ranks, local)
        sent, received = torch.stack([count_E.view(ranks, local).sum(1), received_NE.sum(1)]).tolist()
        local_M = torch.arange(local, device=expert_M.device).repeat(ranks).repeat_interleave(received_NE.flatten())
        local_M, order_M = local_M.sort(stable=True)
        place_M = torch.zeros_like(order_M).scatter(0, order_M, torch.arange(len(order_M), device=order_M.device))
        x_MD, weight_M1 = (routed(x, sent, received, group) for x in (x_MD, weight_M1))
        y_MD = self.compute(
            _Permuted.apply(x_MD, order_M, place_M), _Permuted.apply(weight_M1, order_M, place_M), local_M
        )
        return routed(_Permuted.apply(y_MD, place_M, order_M), received, sent, group)


def ways_to_divide(parts: Sequence[Experts], ranks: int) -> list[int]:
    """Return the numbers of neighbouring ranks over which the experts of all these layers can be divided.

    Each rank gets the same number of experts; 1 means that experts are not divided. Ranks with the same experts divide
    the widths of their weights.
    """
    counts = [part.experts for part in parts]
    widths = {weight.shape[1] for part in parts for weight in part.parameters()}

    def fits(n: int) -> bool:
        return all(count % n == 0 for count in (ranks, *counts)) and all(x % (ranks // n) == 0 for x in widths)

    return [1, *(n for n in range(2, min([ranks, *counts]) + 1 if parts else 0) if fits(n))]


def _spread(x_ND: Tensor, order_M: Tensor) -> Tensor:
    """Return a copy of each row for each of its experts, sorted by expert."""
    return x_ND[order_M // (order_M.shape[0] // x_ND.shape[0])]


def _gather(y_MD: Tensor, place_M: Tensor, rows: int) -> Tensor:
    """Return the sum of each row's copies."""
    return y_MD[place_M].unflatten(0, (rows, -1)).sum(1)


class _Spread(torch.autograd.Function):
    """``_spread`` with the gradient ``_gather``. PyTorch's gradient would sort again, or add in arbitrary order."""

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
    """The identity, with a gradient divided by ``parts``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] / ctx.parts, None


class _Permuted(torch.autograd.Function):
    """Rows in another order, with the gradient in the original order; ``place_M`` is the inverse of ``order_M``."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(place_M)
        return x_MD[order_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place_M,) = ctx.saved_tensors
        return grads[0][place_M], None, None


class _Gather(torch.autograd.Function):
    """``_gather`` with the gradient ``_spread``."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, order_M: Tensor, place_M: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(order_M)
        return _gather(y_MD, place_M, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order_M,) = ctx.saved_tensors
        return _spread(grads[0], order_M), None, None, None
