"""Sinkhorn's alternating normalisation of many small matrices, and its exact reverse.

Matrices are laid out [X,X,N] with the N tokens last, so that every step is a few long vector operations. The reverse works on
g = gradient * value, the gradient with respect to the logarithm: for Y = Z / (sum Z + eps) it is g_Z = g_Y - Y sum(g_Y).
"""

from __future__ import annotations

import torch
from torch import Tensor

SOURCES, DESTINATIONS = 0, 1


def sinkhorn(logit_XXN: Tensor, rounds: int, eps: float) -> list[Tensor]:
    """Every stage of the normalisation: the softmax over destinations plus eps first, the result last."""
    stages = [torch.softmax(logit_XXN, DESTINATIONS).add_(eps)]
    for dim in _order(rounds):
        stages.append(stages[-1] / stages[-1].sum(dim, keepdim=True).add_(eps))
    return stages


def sinkhorn_grad(grad_XXN: Tensor, stages: list[Tensor], rounds: int, eps: float) -> Tensor:
    """The gradient with respect to the logits, from that with respect to the last stage."""
    log_grad = grad_XXN * stages[-1]
    for dim, stage in zip(reversed(_order(rounds)), reversed(stages[1:]), strict=True):
        log_grad.addcmul_(stage, log_grad.sum(dim, keepdim=True), value=-1)
    softmax = stages[0] - eps
    from_softmax = log_grad * softmax / stages[0]
    return from_softmax - softmax * from_softmax.sum(DESTINATIONS, keepdim=True)


def _order(rounds: int) -> list[int]:
    return [SOURCES] + [DESTINATIONS, SOURCES] * (rounds - 1)
