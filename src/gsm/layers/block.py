"""A block: an attention site and a feed-forward site on the residual streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from gsm.costs.primitives import LayerCost, ProductCost, products, told
from gsm.layers.feed_forward import Balance, FeedForward
from gsm.layers.norm import RMSNorm
from gsm.layers.residual import Residual, Streams, entering, entering_cost
from gsm.layers.rope import Rope
from gsm.span import Span
from gsm_kernels import IndexerLoss


class LayerOutput(NamedTuple):
    """What a layer gives back besides its output.

    Attributes:
        cache: what it remembers after the call (None: nothing).
        attended: what its rows attended to, for the layers and stages above (None: nothing).
        indexer_loss: loss and recall of its indexer, in training.
        layer_input_BTD: what its attention read from the streams, before the norm.
        layer_output_BRD: what its streams are read as in the end, before any norm.
        balance: what was sent to the feed-forward's experts, in training. The block adds it and the two above.
    """

    cache: Any
    attended: Any = None
    indexer_loss: IndexerLoss | None = None
    layer_input_BTD: Tensor | None = None
    layer_output_BRD: Tensor | None = None
    balance: Balance | None = None


class Mixer(Protocol):
    """What a block needs of a sequence mixer: attention of any kind, or a recurrence."""

    def start(self, batch: int, kind: str) -> Any:
        """An empty cache for ``batch`` sequences, its bytes labelled ``kind`` (``encoder`` or ``decoder``)."""
        ...

    def __call__(self, x_BTD: Tensor, span: Span, cache: Any, below: Any) -> tuple[Tensor, LayerOutput]:
        """Writes for all T new positions, reads for the last ``span.rows``.

        Args:
            x_BTD: normed input.
            span: the new positions, and how many rows are asked for.
            cache: what this layer remembers.
            below: what the layer below attended to; of the first layer of a decoder what the model gives it.

        Returns:
            ``update_BRD``, the output for the R rows; and what else there is.
        """
        ...

    def work(self, kind: str, below: Any) -> LayerCost:
        """What it costs; ``kind`` as of ``start``, ``below``: the cost of the layer that ``below`` comes from."""
        ...


class MixerGeometry(Protocol):
    """What a mixer of the slot ``model/mixer`` may ask of the geometry, besides the widths of attention."""

    @property
    def window(self) -> int:
        """Entries of a local window."""
        ...

    @property
    def top_k(self) -> int:
        """Entries that a row selects from what is far."""
        ...

    def window_rope(self) -> Rope:
        """Rotation of layers that see a window."""
        ...

    def bank_rope(self) -> Rope:
        """Rotation of layers that see the whole context."""
        ...


class SlotMixer(Mixer, Protocol):
    """A mixer of the slot ``model/mixer``, made by a call ``mixer(shape, geometry=..., name=...)``."""

    @property
    def reach(self) -> int | None:
        """How many positions back of its input a row needs (0: its own alone, None: all of them)."""
        ...


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

    def forward(self, streams: Streams, span: Span, cache: Any, below: Any) -> tuple[Streams, LayerOutput]:
        """From the streams of T positions to those of the last ``span.rows``; for none, the mixer only remembers."""
        layer_input_BTD = entering(self.attention_residual, streams)
        update_BRD, out = self.attention(self.attention_norm(layer_input_BTD), span, cache, below)
        if not span.rows:
            streams = streams.last(0)
            return streams, out._replace(layer_input_BTD=layer_input_BTD, layer_output_BRD=streams.mixed_BTD)
        streams = self.attention_residual.leave(streams, update_BRD)
        fed_input_BRD = entering(self.feed_forward_residual, streams)
        fed = self.feed_forward(self.feed_forward_norm(fed_input_BRD), span.row_position_BR)
        streams = self.feed_forward_residual.leave(streams, fed.update_BRD)
        ends = {"layer_input_BTD": layer_input_BTD, "layer_output_BRD": streams.mixed_BTD}
        return streams, out._replace(**ends, balance=fed.balance)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """What it costs: its mixer, its feed-forward, and both sites. Raises ValueError for a part whose cost is not
        known."""
        mixer: LayerCost = told(self.attention, "work", kind, below)
        norms = products(self.attention_norm, self.feed_forward_norm)
        sites = (self.attention_residual, self.feed_forward_residual)
        mixing = sum((told(site, "products") for site in sites), entering_cost(self.feed_forward_residual))
        rows = {"feed-forward": told(self.feed_forward, "products") + norms, "hyper-connections": mixing}
        read = entering_cost(self.attention_residual)  # the mixer wants all positions of it
        return mixer + LayerCost(rows, {"hyper-connections": read} if read != ProductCost() else {})
