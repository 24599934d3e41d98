"""Attention and a recurrence in one layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gsm.layers.block import LayerOutput, Mixer
from gsm.layers.costs import LayerCost
from gsm.layers.recurrence import Recurrence
from gsm.span import Span


class MixerSum(nn.Module):
    """The sum of an attention and a recurrence on the same input. Layers and stages above see the attention's entries.

    Hymba (Dong et al., 2024, arXiv 2411.13676) averages normed and scaled outputs of both; here they are added.

    Args:
        attention: a mixer of any kind.
        recurrence: a recurrent mixer.

    Raises:
        ValueError: for another mixer in place of the recurrence. It would have entries and taps of its own.
    """

    # Number of earlier positions of its input that a row needs: all of them.
    reach: int | None = None

    def __init__(self, attention: Mixer, recurrence: Mixer):
        super().__init__()
        if not isinstance(recurrence, Recurrence):
            raise ValueError(
                f"beside=true is not allowed because the mixer {type(recurrence).__name__} is no recurrence. Use one, "
                "such as gated_delta_net"
            )
        self.attention, self.recurrence = attention, recurrence

    def start(self, batch: int, kind: str) -> tuple[Any, Any]:
        """Return the empty caches of both; ``kind`` (``encoder`` or ``decoder``) labels their bytes."""
        return self.attention.start(batch, kind), self.recurrence.start(batch, kind)

    def forward(self, x_BTD: Tensor, span: Span, cache: tuple[Any, Any], below: Any) -> tuple[Tensor, LayerOutput]:
        """Run both on the T new positions; return the sum of their updates of the last R, [B, R, D]."""
        attention_BRD, out = self.attention(x_BTD, span, cache[0], below)
        recurrence_BRD, other = self.recurrence(x_BTD, span, cache[1], below)
        return attention_BRD + recurrence_BRD, out._replace(cache=(out.cache, other.cache))

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of both."""
        return self.attention.work(kind, below) + self.recurrence.work(kind, below)
