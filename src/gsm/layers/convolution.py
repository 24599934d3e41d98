"""A short causal convolution: every channel mixes its own last few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gsm.cache.store import Window, WindowStore
from gsm.errors import within
from gsm.layers.costs import ProductCost, Store
from gsm.layers.linear import draw
from gsm_kernels.device import at_least_float32, handed_out, in_dtype, once


class ShortConvolution(nn.Module):
    """A depthwise causal convolution: ``y_t = sum_j w_j * x_(t-j)`` for 0 <= j < width, inside a document.

    Introduced in H3 (Fu et al., 2023); later recurrent mixers use it too.

    Args:
        channels: width of the input and the output.
        width: number of tokens that a position sees, including itself.
        zero: start with zero weights instead of random ones.

    Raises:
        ValueError: if ``width`` is not in [1, 1024].
    """

    def __init__(self, channels: int, width: int, *, zero: bool = False):
        super().__init__()
        within(1, 1024, convolution=width)
        self.width = width
        self.weight = nn.Parameter(torch.zeros(channels, width))
        if not zero:
            draw(self.weight, width**-0.5)

    def forward(self, seen_BEC: Tensor, position_BT: Tensor) -> Tensor:
        """Return the convolution at the new positions.

        Args:
            seen_BEC: the new tokens, preceded by up to ``width - 1`` stored tokens.
            position_BT: int64, positions of the new tokens in their documents; -1 for padding, whose output is 0.

        Returns:
            [B, T, C] in the dtype of ``seen_BEC``, summed in at least float32.
        """
        return short_convolution(seen_BEC, self.weight, position_BT)

    def added(self, x_BTC: Tensor, cache: WindowStore, position_BT: Tensor) -> tuple[Tensor, WindowStore]:
        """Return the new tokens plus their convolution, [B, T, C] in their dtype, and the next cache."""
        seen_BEC, cache = cache.extend(x_BTC)
        return x_BTC + in_dtype(self(seen_BEC, position_BT), x_BTC.dtype), cache

    def start(self, batch: int, kind: str) -> Window:
        """Return an empty window for the last inputs; ``kind`` (``encoder`` or ``decoder``) labels its bytes."""
        return Window.empty(f"{kind}_convolution", self.width - 1, self.weight.new_empty(batch, len(self.weight)))

    def store(self, kind: str) -> Store:
        """Return the size of that window; ``kind`` as in ``start``."""
        return Store(f"{kind}_convolution", len(self.weight), self.width - 1, carried=True)

    def products(self) -> ProductCost:
        """Return the cost per token: one multiply-add for every channel and weight."""
        return ProductCost(self.weight.numel(), 2 * len(self.weight), self.weight.numel())


def short_convolution(seen_BEC: Tensor, weight_CW: Tensor, position_BT: Tensor) -> Tensor:
    """Compute `ShortConvolution.forward`, and keep only the arguments for the backward pass."""
    return _ShortConvolution.apply(seen_BEC, weight_CW, position_BT)


class _ShortConvolution(torch.autograd.Function):
    """Masks one tensor in place, distance by distance: a token without a token at distance j has none farther away."""

    @staticmethod
    def forward(ctx: Any, seen_BEC: Tensor, weight_CW: Tensor, position_BT: Tensor) -> Tensor:
        ctx.save_for_backward(seen_BEC, weight_CW, position_BT)
        wide_BEC, tap_WC = _widened(seen_BEC, weight_CW)
        total_BTC = wide_BEC.new_zeros(*position_BT.shape, len(weight_CW))
        for tap_C, rows, entries, reached_BT1 in reversed(_reaches(wide_BEC, tap_WC, position_BT)):
            total_BTC[:, rows].addcmul_(wide_BEC[:, entries], tap_C)
            total_BTC.mul_(reached_BT1)
        return handed_out(total_BTC, seen_BEC.dtype)

    @staticmethod
    @once
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of the entries [B, E, C] and the weights [C, W], each in the dtype of its tensor."""
        seen_BEC, weight_CW, position_BT = ctx.saved_tensors
        wide_BEC, tap_WC = _widened(seen_BEC, weight_CW)
        pull_BTC = grad_BTC.to(wide_BEC.dtype, copy=True)
        seen_grad_BEC, tap_grad_WC = torch.zeros_like(wide_BEC), torch.zeros_like(tap_WC)
        for back, (tap_C, rows, entries, reached_BT1) in enumerate(_reaches(wide_BEC, tap_WC, position_BT)):
            pull_BTC.mul_(reached_BT1)
            seen_grad_BEC[:, entries].addcmul_(pull_BTC[:, rows], tap_C)
            tap_grad_WC[back] = (pull_BTC[:, rows] * wide_BEC[:, entries]).sum((0, 1))
        return in_dtype(seen_grad_BEC, seen_BEC.dtype), in_dtype(tap_grad_WC.T, weight_CW.dtype), None


def _widened(seen_BEC: Tensor, weight_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries in at least float32, and the weights in their dtype with the channels last."""
    wide_BEC = at_least_float32(seen_BEC)
    return wide_BEC, in_dtype(weight_CW, wide_BEC.dtype).T.contiguous()


def _reaches(wide_BEC: Tensor, tap_WC: Tensor, position_BT: Tensor) -> list[tuple[Tensor, slice, slice, Tensor]]:
    """Return for every distance j: its weights, the slice of new tokens for which an entry j tokens back is present,
    the slice of these entries, and 1 for every such token with at least j tokens before it in its document, else 0."""
    entries, length = wide_BEC.shape[1], position_BT.shape[1]
    stored, farthest = entries - length, min(len(tap_WC), entries)
    back_W11 = torch.arange(farthest, device=position_BT.device)[:, None, None]
    reached_WBT1 = (position_BT >= back_W11)[..., None].to(wide_BEC.dtype)
    first_W = [max(back - stored, 0) for back in range(farthest)]
    return [
        (tap_WC[back], slice(first, None), slice(stored + first - back, entries - back), reached_WBT1[back])
        for back, first in enumerate(first_W)
    ]
