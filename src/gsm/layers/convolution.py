"""A short causal convolution: every channel mixes its own last few tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gsm.errors import within
from gsm.layers.costs import ProductCost
from gsm.layers.linear import draw
from gsm_kernels import short_convolution


class ShortConvolution(nn.Module):
    """``y_t = sum_j w_j * x_(t-j)`` for j below the width, channel by channel, over the tokens of one document.

    The depthwise convolution of H3 (Fu et al., 2023), which later recurrent mixers also use.

    Args:
        channels: width of the input and the output.
        width: tokens that a position sees, including itself.
        zero: start at zero instead of random weights.

    Raises:
        ValueError: for a width outside of 1 to 1024.
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
            seen_BEC: the new tokens, after at most ``width - 1`` stored tokens.
            position_BT: int64, document-local positions of the new tokens; -1 is padding and gives 0.

        Returns:
            [B, T, C] in the dtype of ``seen_BEC``, summed in at least float32.
        """
        return short_convolution(seen_BEC, self.weight, position_BT)

    def products(self) -> ProductCost:
        """Return the cost per token: a product of every channel with each of its weights."""
        return ProductCost(self.weight.numel(), 2 * len(self.weight), self.weight.numel())
