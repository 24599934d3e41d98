"""Sinkhorn's alternating normalisation of many small matrices, and its exact reverse.

Matrices are laid out [X,X,N] with the N tokens last, so that every step is a few long vector operations. Of each step
only the divisors are kept: the reverse multiplies its way back through the matrices. It works on g = gradient *
value, the gradient with respect to the logarithm: for Y = Z / (sum Z + eps) it is g_Z = g_Y - Y sum(g_Y).
"""

from __future__ import annotations

import torch
from torch import Tensor

SOURCES, DESTINATIONS = 0, 1


def sinkhorn(logit_XXN: Tensor, rounds: int, eps: float) -> tuple[Tensor, list[Tensor]]:
    """The normalised matrices, and the divisors of each step in order."""
    little = logit_XXN.new_full((), eps)  # PyTorch makes a tensor of a number, and converts it, each time it is added
    matrix_XXN = torch.softmax(logit_XXN, DESTINATIONS).add_(little)
    divisors = []
    for dim in _order(rounds):
        divisors.append(matrix_XXN.sum(dim, keepdim=True).add_(little))
        matrix_XXN.div_(divisors[-1])
    return matrix_XXN, divisors


def sinkhorn_grad(grad_XXN: Tensor, matrix_XXN: Tensor, divisors: list[Tensor], eps: float) -> Tensor:
    """The gradient with respect to the logits, from that with respect to the normalised matrices."""
    log_grad, matrix_XXN = grad_XXN * matrix_XXN, matrix_XXN.clone()
    for dim, divisor in zip(reversed(_order((len(divisors) + 1) // 2)), reversed(divisors), strict=True):
        log_grad.addcmul_(matrix_XXN, log_grad.sum(dim, keepdim=True), value=-1)
        matrix_XXN.mul_(divisor)
    softmax = matrix_XXN - eps
    from_softmax = log_grad * softmax / matrix_XXN
    return from_softmax - softmax * from_softmax.sum(DESTINATIONS, keepdim=True)


def _order(rounds: int) -> list[int]:
    return [SOURCES] + [DESTINATIONS, SOURCES] * (rounds - 1)
