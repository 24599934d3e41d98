"""Losses whose gradients are computed in forward, together with the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .device import handed_out, once
from .inputs import learns


def with_gradients(
    loss: Tensor, learned: Sequence[Tensor], grads: Sequence[Tensor | None], factor: Tensor | None = None
) -> Tensor:
    """Return a loss whose backward multiplies the given gradients by the incoming gradient and `factor`.

    Args:
        loss: a scalar. Compute it, `grads` and `factor` under `no_grad`.
        learned: the tensors that may need a gradient.
        grads: the gradient of each, in any dtype; ignored for a tensor that needs none.
        factor: a scalar; None: 1.
    """
    if not learns(*learned):
        return loss
    pairs = [(x, grad) for x, grad in zip(learned, grads, strict=True) if learns(x)]
    tensors = [tensor for pair in pairs for tensor in pair]
    return _Loss.apply(loss, torch.ones_like(loss) if factor is None else factor, *tensors)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, factor, *pairs):
        ctx.save_for_backward(factor, *pairs[1::2])
        ctx.dtypes = [x.dtype for x in pairs[::2]]
        return handed_out(loss)

    @staticmethod
    @once
    def backward(ctx, grad):
        factor, *saved = ctx.saved_tensors
        share, grads = grad * factor, []
        for x, dtype in zip(saved, ctx.dtypes, strict=True):
            grads += [torch.mul(x, share, out=torch.empty_like(x, dtype=dtype)), None]
        return None, None, *grads
