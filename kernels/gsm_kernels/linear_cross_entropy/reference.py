"""Plain PyTorch linear cross-entropy in chunks of rows. The gradients are computed with the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32, scratch_elements
from ..inputs import learns
from ..rows import slices
from ..with_gradients import with_gradients

# Rows of a chunk at least. Each chunk reads the weight three times, so smaller chunks would be limited by bandwidth.
FEWEST_ROWS = 256


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int = -100) -> Tensor:
    """See `gsm_kernels.linear_cross_entropy`."""
    learns_hidden, learns_weight = learns(hidden_ND), learns(weight_VD)
    with torch.no_grad():
        hidden, weight = at_least_float32(hidden_ND), at_least_float32(weight_VD)
        counted = target_N != ignore_index
        share = counted.to(hidden.dtype) / counted.sum().clamp(min=1)
        target = target_N.masked_fill(~counted, 0)[:, None]
        loss = hidden.new_zeros(())
        hidden_grad = torch.empty_like(hidden) if learns_hidden else None
        weight_grad = torch.zeros_like(weight) if learns_weight else None
        step = max(FEWEST_ROWS, scratch_elements(hidden.device) // max(1, weight.shape[0]))
        for rows in slices(hidden.shape[0], step):
            logits = hidden[rows] @ weight.T
            log_model = torch.log_softmax(logits, -1, out=logits)  # in place, because the logits are in the cache
            loss -= log_model.gather(1, target[rows])[:, 0] @ share[rows]
            if learns_hidden or learns_weight:
                _add_gradients(hidden, weight, hidden_grad, weight_grad, rows, log_model, target, share[:, None])
    return with_gradients(loss, (hidden_ND, weight_VD), (hidden_grad, weight_grad))


def _add_gradients(hidden, weight, hidden_grad, weight_grad, rows, log_model, target, share) -> None:
    """Write the gradient of the chunk's rows, and add to that of the weight. It overwrites `log_model`."""
    logit_grad = log_model.exp_()
    logit_grad.scatter_add_(1, target[rows], logit_grad.new_full((1, 1), -1.0).expand(logit_grad.shape[0], 1))
    # `share` multiplies the operand with D columns instead of the logits, which have V.
    if hidden_grad is not None:
        hidden_grad[rows] = (logit_grad @ weight).mul_(share[rows])
    if weight_grad is not None:
        weight_grad.addmm_(logit_grad.T, hidden[rows] * share[rows])
