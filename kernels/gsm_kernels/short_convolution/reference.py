"""Plain PyTorch short convolution, with a hand-written backward that saves only its inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision, handed_out, in_dtype, once


def short_convolution(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    """See `gsm_kernels.short_convolution`."""
    return _ShortConvolution.apply(seen_BEC, weight, position_BT)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, seen_BEC, weight, position_BT):
        """Return the sum for every new token, in the dtype of seen."""
        ctx.save_for_backward(seen_BEC, weight, position_BT)
        wide_BEC, tap_WC = _widened(seen_BEC, weight)
        total_BTC = wide_BEC.new_zeros(*position_BT.shape, len(weight))
        for back, rows, entries in _reaches(seen_BEC, weight, position_BT):
            reached_BR1 = (position_BT[:, rows] >= back)[..., None]  # inside the same document
            total_BTC[:, rows].addcmul_(wide_BEC[:, entries] * reached_BR1, tap_WC[back])
        return handed_out(total_BTC, seen_BEC.dtype)

    @staticmethod
    @once
    def backward(ctx, grad_BTC):
        """Return the gradients of seen and weight, each in the dtype of its input."""
        seen_BEC, weight, position_BT = ctx.saved_tensors
        with full_precision(grad_BTC):
            wide_BEC, tap_WC = _widened(seen_BEC, weight)
            wide_grad_BTC = in_dtype(grad_BTC, wide_BEC.dtype)
            seen_grad_BEC, tap_grad_WC = torch.zeros_like(wide_BEC), torch.zeros_like(tap_WC)
            for back, rows, entries in _reaches(seen_BEC, weight, position_BT):
                pull_BRC = wide_grad_BTC[:, rows] * (position_BT[:, rows] >= back)[..., None]
                seen_grad_BEC[:, entries].addcmul_(pull_BRC, tap_WC[back])
                tap_grad_WC[back] = (pull_BRC * wide_BEC[:, entries]).sum((0, 1))
        return seen_grad_BEC.to(seen_BEC.dtype), tap_grad_WC.T.to(weight.dtype), None


def _widened(seen_BEC: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries in at least float32, and the filters with the channels last."""
    wide_BEC = at_least_float32(seen_BEC)
    return wide_BEC, in_dtype(weight, wide_BEC.dtype).T.contiguous()


def _reaches(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Yield every distance `back`, the new tokens with an entry at this distance, and these entries."""
    entries, length = seen_BEC.shape[1], position_BT.shape[1]
    stored = entries - length
    for back in range(min(weight.shape[1], entries)):
        first = max(back - stored, 0)
        yield back, slice(first, length), slice(stored + first - back, entries - back)
