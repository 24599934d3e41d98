"""The only block in the house: an attention site and a feed-forward site on the residual streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from gsm.cache.view import Attended
from gsm.layers.feed_forward import Balance, FeedForward
from gsm.layers.norm import RMSNorm
from gsm.layers.residual import Residual, Streams
from gsm.span import Span
from gsm_kernels import IndexerLoss


class Mixed(NamedTuple):
    """What a mixer gives back.

    Attributes:
        update_BRD: its output for the R rows asked for.
        own: its memory after the call (None: it remembers nothing).
        view: what later layers and stages may read (None: nothing).
        learned: loss and recall of its indexer, in training.
    """

    update_BRD: Tensor
    own: Any
    view: Attended | None
    learned: IndexerLoss | None = None


class Mixer(Protocol):
    """What a block needs of a sequence mixer: attention of any kind, or a recurrence."""

    def start(self, batch: int, kind: str) -> Any:
        """An empty memory for ``batch`` sequences, its bytes labelled ``kind`` (``encoder`` or ``decoder``)."""
        ...

    def __call__(self, x_BTD: Tensor, span: Span, own: Any, view: Attended | None) -> Mixed:
        """Writes for all T new positions, reads for the last ``span.rows``."""
        ...


class SlotMixer(Mixer, Protocol):
    """A mixer of the slot ``model/mixer``, made by a call ``mixer(shape, geometry=..., name=...)``."""

    @property
    def reach(self) -> int | None:
        """How many positions back of its input a row needs (0: its own alone, None: all of them)."""
        ...


class BlockOutput(NamedTuple):
    """What a block gives back.

    Attributes:
        streams: residual streams of the rows asked for.
        entered_BTD: what its attention read from the streams, before the norm: the paper's h of the layer (equation 7).
        own: the mixer's memory after the call.
        view: what its attention looked at.
        learned: loss and recall of the mixer's indexer, in training.
        balance: loss and loads of the feed-forward's experts, in training.
    """

    streams: Streams
    entered_BTD: Tensor
    own: Any
    view: Attended | None
    learned: IndexerLoss | None
    balance: Balance | None


class Block(nn.Module):
    """Reads the streams, mixes positions, writes back; then the same with the feed-forward.

    Args:
        dim: model width.
        attention: a sequence mixer.
        feed_forward: called with ``dim``; maps each row on its own.
        residual: called with ``dim``, once for each site.
    """

    def __init__(
        self,
        dim: int,
        attention: Mixer,
        *,
        feed_forward: Callable[[int], FeedForward],
        residual: Callable[[int], Residual],
    ):
        super().__init__()
        self.attention_residual = residual(dim)
        self.attention_norm = RMSNorm(dim)
        self.attention = attention
        self.feed_forward_residual = residual(dim)
        self.feed_forward_norm = RMSNorm(dim)
        self.feed_forward = feed_forward(dim)

    def forward(self, streams: Streams, span: Span, own: Any, view: Attended | None) -> BlockOutput:
        """From the streams of T positions to those of the last ``span.rows``."""
        entered_BTD = streams.mixed_BTD
        mixed = self.attention(self.attention_norm(entered_BTD), span, own, view)
        streams = self.attention_residual.leave(streams, mixed.update_BRD)
        fed = self.feed_forward(self.feed_forward_norm(streams.mixed_BTD), span.row_position_BR)
        streams = self.feed_forward_residual.leave(streams, fed.update_BRD)
        return BlockOutput(streams, entered_BTD, mixed.own, mixed.view, mixed.learned, fed.balance)
