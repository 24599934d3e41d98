"""A block: a sequence mixer (attention or a recurrence) and a feed-forward on the residual streams.

A *site* is the place of either: it reads the streams, and its output is written back to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from gsm.cache.memory import ConvolvedCache
from gsm.layers.convolution import ShortConvolution
from gsm.layers.costs import LayerCost, ProductCost, declared_cost, products
from gsm.layers.feed_forward import Balance, FeedForward
from gsm.layers.norm import RMSNorm
from gsm.layers.residual import Residual, Streams, entering, entering_cost, with_read_out
from gsm.layers.rope import Rope
from gsm.observe import tap
from gsm.span import Span
from gsm_kernels import IndexerLoss


class LayerOutput(NamedTuple):
    """The outputs of a layer besides the residual streams.

    Attributes:
        cache: its cache after the call (None: it has none).
        attended: the entries that its rows attended to, for the layers and stages above (None: none; then the
            stack passes on the entries of the layer below).
        indexer_loss: in training: the loss and recall of its indexer (None: it has none).
        layer_input_BTD: input of its attention, read from the streams, before the norm; set by the block.
        layer_output_BRD: read-out of its final streams, before any norm; set by the block.
        balance: in training: the loads of the feed-forward's experts; set by the block.
    """

    cache: Any
    attended: Any = None
    indexer_loss: IndexerLoss | None = None
    layer_input_BTD: Tensor | None = None
    layer_output_BRD: Tensor | None = None
    balance: Balance | None = None


class Mixer(Protocol):
    """The interface of a sequence mixer: attention of any kind, or a recurrence.

    A mixer of the config group ``model/mixer`` is built by ``mixer(shape, geometry=..., name=...)``.
    """

    @property
    def reach(self) -> int | None:
        """Number of earlier positions of its input that a row needs (0: only its own, None: all of them)."""
        ...

    def start(self, batch: int, kind: str) -> Any:
        """Return an empty cache for ``batch`` sequences; ``kind`` (``encoder`` or ``decoder``) labels its bytes."""
        ...

    def __call__(self, x_BTD: Tensor, span: Span, cache: Any, below: Any) -> tuple[Tensor, LayerOutput]:
        """Write entries for all T new positions, and compute the output for the last R = ``span.rows`` of them.

        Args:
            x_BTD: normed input.
            span: the new positions, with the number of requested rows.
            cache: the cache of this layer.
            below: the entries that the layer below attended to; for the first decoder layer, those that the model
                gives it, such as GSM's state.

        Returns:
            The output of the R rows, [B, R, D], and the other outputs.
        """
        ...

    def work(self, kind: str, below: Any) -> LayerCost:
        """Return the cost of the layer; ``kind`` as in ``start``, ``below`` the cost of the layer below."""
        ...


class MixerGeometry(Protocol):
    """The fields of ``gsm.models.geometry.Geometry`` that a mixer of ``model/mixer`` may use besides its ``Shape``."""

    @property
    def window(self) -> int:
        """Number of entries of a local window."""
        ...

    @property
    def top_k(self) -> int:
        """Number of distant entries that a row selects."""
        ...

    def window_rope(self) -> Rope:
        """Return the rotary embedding of layers that see a window."""
        ...

    def bank_rope(self) -> Rope:
        """Return the rotary embedding of layers that see the whole context."""
        ...


# Names of the taps of a site's input and of its streams, for the attention and for the feed-forward.
ENTERING, BETWEEN = ("stream", "streams"), ("stream/between", "streams/between")


class Block(nn.Module):
    """A mixer followed by a feed-forward. Each reads the residual streams and writes its output back.

    With a convolution, the feed-forward reads ``x_t + sum_j w_j * x_(t-j)``, channel by channel, inside a document. The
    weights start at zero, so that a new model equals one without the convolution (Canon layers: Allen-Zhu, 2025, arXiv
    2512.17351).

    Args:
        dim: model width.
        attention: a sequence mixer.
        feed_forward: makes the feed-forward, which maps each row independently; called with ``dim``.
        residual: makes the residual connection of a site; called with ``dim``, once for each site.
        name: prefix of the names of its taps, equal to that of its mixer, e.g. ``encoder/3``.
        convolution: width in tokens of the convolution before the feed-forward; 1: no convolution.
    """

    def __init__(
        self,
        dim: int,
        attention: Mixer,
        *,
        feed_forward: Callable[[int], FeedForward],
        residual: Callable[[int], Residual],
        name: str,
        convolution: int = 1,
    ):
        super().__init__()
        self.name = name
        self.attention_residual = residual(dim)
        self.attention_norm = RMSNorm(dim)
        self.attention = attention
        self.feed_forward_residual = residual(dim)
        self.feed_forward_norm = RMSNorm(dim)
        self.feed_forward = feed_forward(dim)
        self.convolution = ShortConvolution(dim, convolution, zero=True) if convolution != 1 else None

    @property
    def incomplete(self) -> int:
        """Number of rows at the beginning of a pruned call that lack tokens for the convolution."""
        return 0 if self.convolution is None else self.convolution.width - 1

    def start(self, batch: int, kind: str) -> Any:
        """Return an empty cache for ``batch`` sequences; ``kind`` (``encoder`` or ``decoder``) labels its bytes."""
        cache = self.attention.start(batch, kind)
        if self.convolution is None:
            return cache
        return ConvolvedCache(cache, self.convolution.start(batch, kind))

    def forward(self, streams: Streams, span: Span, cache: Any, below: Any) -> tuple[Streams, LayerOutput]:
        """Map the streams of T positions to those of the last ``span.rows`` positions. For 0 rows, only update the
        mixer's cache."""
        mixer, window = (cache, None) if self.convolution is None else (cache.mixer, cache.convolution)
        streams, layer_input_BTD = self.entered(self.attention_residual, streams, ENTERING)
        update_BRD, out = self.attention(self.attention_norm(layer_input_BTD), span, mixer, below)
        balance = None
        if not span.rows:
            streams = streams.last_rows(0)
        else:
            streams = self.attention_residual.leave(streams, tap((self, "attention"), update_BRD))
            streams, x_BRD = self.entered(self.feed_forward_residual, streams, BETWEEN)
            x_BRD = self.feed_forward_norm(x_BRD)
            if self.convolution is not None and window is not None:
                x_BRD, window = self.convolution.added(x_BRD, window, span.row_position_BR)
            fed = self.feed_forward(x_BRD, span.row_position_BR)
            update_BRD, balance = tap((self, "feed_forward"), fed.update_BRD), fed.balance
            streams = self.feed_forward_residual.leave(streams, update_BRD)
            streams = with_read_out(streams, tap((self, "stream/after"), streams.mixed_BTD))
        after = out.cache if window is None else ConvolvedCache(out.cache, window)
        ends = {"layer_input_BTD": layer_input_BTD, "layer_output_BRD": streams.mixed_BTD}
        return streams, out._replace(cache=after, balance=balance, **ends)

    def entered(self, site: Residual, streams: Streams, names: tuple[str, str]) -> tuple[Streams, Tensor]:
        """Return the streams before a site and the site's input [B, T, D], after any patch of their taps."""
        if site.streams == 1:
            streams = with_read_out(streams, tap((self, names[0]), streams.mixed_BTD))
            return streams, entering(site, streams)
        value_BTXD = tap((self, names[1]), streams.value_BTXD)
        if value_BTXD is not streams.value_BTXD:
            streams = streams._replace(value_BTXD=value_BTXD)
        return streams, tap((self, names[0]), entering(site, streams))

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of the mixer, the feed-forward and both residual connections.

        Raises:
            ValueError: if one of them has no cost method.
        """
        mixer: LayerCost = declared_cost(self.attention, "work", kind, below)
        norms = products(self.attention_norm, self.feed_forward_norm)
        sites = (self.attention_residual, self.feed_forward_residual)
        mixing = sum((declared_cost(site, "products") for site in sites), entering_cost(self.feed_forward_residual))
        rows = {"feed-forward": declared_cost(self.feed_forward, "products") + norms, "hyper-connections": mixing}
        read = entering_cost(self.attention_residual)  # the mixer reads all positions
        total = mixer + LayerCost(rows, {"hyper-connections": read} if read != ProductCost() else {})
        if self.convolution is None:
            return total
        return total + LayerCost({"convolution": self.convolution.products()}, stores=(self.convolution.store(kind),))
