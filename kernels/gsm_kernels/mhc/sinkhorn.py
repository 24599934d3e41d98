"""Sinkhorn's alternating normalisation of many small matrices, and its gradient.

Matrices have shape [X,X,N] with the N tokens last, so that every step is a few long vector operations. Forward keeps
only the divisors of each step; backward multiplies by them to recover the matrices. Backward computes with g = gradient
* value, the gradient with respect to the logarithm: for Y = Z / (sum Z + eps), g_Z = g_Y - Y sum(g_Y).
"""

from __future__ import annotations

import torch
from torch import Tensor

SOURCES, DESTINATIONS = 0, 1


def sinkhorn(logit_XXN: Tensor, rounds: int, eps: float) -> tuple[Tensor, list[Tensor]]:
    """Normalise exp(logit) alternately over sources and destinations.

    Returns:
        The normalised matrices [X,X,N] (source, destination), and the divisors of each step in order.
    """
    little = logit_XXN.new_full((), eps)  # as a tensor, because PyTorch would convert a number at each addition
    matrix_XXN = torch.softmax(logit_XXN, DESTINATIONS).add_(little)
    divisors = []
    for dim in _order(rounds):
        divisors.append(matrix_XXN.sum(dim, keepdim=True).add_(little))
        matrix_XXN.div_(divisors[-1])
    return matrix_XXN, divisors


def sinkhorn_grad(grad_XXN: Tensor, matrix_XXN: Tensor, divisors: list[Tensor], eps: float) -> Tensor:
    """Return the gradient of the logits, from that of the normalised matrices and the results of `sinkhorn`."""
    log_grad, matrix_XXN = grad_XXN * matrix_XXN, matrix_XXN.clone()
    for dim, divisor in zip(reversed(_order((len(divisors) + 1) // 2)), reversed(divisors), strict=True):
        log_grad.addcmul_(matrix_XXN, log_grad.sum(dim, keepdim=True), value=-1)
        matrix_XXN.mul_(divisor)
    softmax = matrix_XXN - eps
    from_softmax = log_grad * softmax / matrix_XXN
    return from_softmax - softmax * from_softmax.sum(DESTINATIONS, keepdim=True)


def _order(rounds: int) -> list[int]:
    return [SOURCES] + [DESTINATIONS, SOURCES] * (rounds - 1)
