"""The only block in the house: an attention site and a feed-forward site on the residual streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from gsm.memory.view import View
from gsm.nn.norm import RMSNorm
from gsm.nn.residual import Streams
from gsm.span import Span
from gsm_kernels import IndexerLoss


class BlockOutput(NamedTuple):
    """What a block gives back.

    Attributes:
        streams: residual streams of the rows asked for.
        entered_BTD: what its attention read from the streams, before the norm: the paper's h of the layer (equation 7).
        own: the mixer's memory after the call.
        view: what its attention looked at.
        learned: loss and recall of the mixer's indexer, in training.
    """

    streams: Streams
    entered_BTD: Tensor
    own: Any
    view: View
    learned: IndexerLoss | None


class Block(nn.Module):
    """Reads the streams, mixes positions, writes back; then the same with the feed-forward.

    Args:
        dim: model width.
        attention: a sequence mixer.
        feed_forward: called with ``dim``; maps [..., D] to [..., D].
        residual: called with ``dim``, once for each site.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        *,
        feed_forward: Callable[[int], nn.Module],
        residual: Callable[[int], nn.Module],
    ):
        super().__init__()
        self.attention_residual = residual(dim)
        self.attention_norm = RMSNorm(dim)
        self.attention = attention
        self.feed_forward_residual = residual(dim)
        self.feed_forward_norm = RMSNorm(dim)
        self.feed_forward = feed_forward(dim)

    def forward(self, streams: Streams, span: Span, own: Any, view: View | None) -> BlockOutput:
        """From the streams of T positions to those of the last ``span.rows``."""
        entered_BTD = streams.mixed()
        mixed = self.attention(self.attention_norm(entered_BTD), span, own, view)
        streams = self.attention_residual.leave(streams, mixed.update_BRD)
        update_BRD = self.feed_forward(self.feed_forward_norm(streams.mixed()))
        streams = self.feed_forward_residual.leave(streams, update_BRD)
        return BlockOutput(streams, entered_BTD, mixed.own, mixed.view, mixed.learned)
