"""A short causal convolution in front of a recurrence: every channel mixes its own last few tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gsm.costs.primitives import ProductCost
from gsm.layers.linear import draw
from gsm_kernels import short_convolution


class ShortConvolution(nn.Module):
    """``y_t = sum_j w_j * x_(t-j)`` for j below the width, channel by channel, over the tokens of one document.

    The depthwise convolution of H3 (Fu et al., 2023), which recurrent mixers have kept since.

    Args:
        channels: width of the input and the output.
        width: tokens that a position sees, itself included.

    Raises:
        ValueError: for a width below 1.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        if width < 1:
            raise ValueError(f"convolution must see at least 1 token, the position itself; got {width}")
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))
        draw(self.weight, width**-0.5)

    def forward(self, seen_BEC: Tensor, position_BT: Tensor) -> Tensor:
        """The convolution at the new positions.

        Args:
            seen_BEC: new tokens at the end, at most ``width - 1`` stored ones before them.
            position_BT: int64, document-local positions of the new tokens; -1 is padding and gives 0.

        Returns:
            [B, T, C] in the dtype of ``seen_BEC``, summed in at least float32.
        """
        return short_convolution(seen_BEC, self.weight, position_BT)

    def products(self) -> ProductCost:
        """What it costs for each token: a product of every channel with every weight of its own."""
        return ProductCost(self.weight.numel(), 2 * len(self.weight), self.weight.numel())
