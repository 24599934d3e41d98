"""A short causal convolution: every channel mixes its own last few tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.cache.store import Window, WindowStore
from gsm.errors import within
from gsm.layers.costs import ProductCost, Store
from gsm.layers.linear import draw
from gsm_kernels.device import at_least_float32, in_dtype
from gsm_kernels.recomputed import recomputed


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
        """Return the cost per token: a product of every channel with each of its weights."""
        return ProductCost(self.weight.numel(), 2 * len(self.weight), self.weight.numel())


def short_convolution(seen_BEC: Tensor, weight_CW: Tensor, position_BT: Tensor) -> Tensor:
    """Return what `ShortConvolution.forward` does; backward keeps the arguments alone, and computes the rest again."""
    return recomputed(_sum, seen_BEC, weight_CW, position_BT)


def _sum(seen_BEC: Tensor, weight_CW: Tensor, position_BT: Tensor) -> Tensor:
    length, width = position_BT.shape[1], weight_CW.shape[1]
    before = seen_BEC.shape[1] - length
    wide_BEC = F.pad(at_least_float32(seen_BEC), (0, 0, width - 1 - before, 0))
    tap_WC = in_dtype(weight_CW, wide_BEC.dtype).T.contiguous()
    total_BTC = torch.zeros_like(wide_BEC[:, width - 1 :])
    for back, tap_C in enumerate(tap_WC):
        reached_BT1 = (position_BT >= back)[..., None]
        total_BTC = total_BTC.addcmul(wide_BEC[:, width - 1 - back :][:, :length] * reached_BT1, tap_C)
    return in_dtype(total_BTC, seen_BEC.dtype)
