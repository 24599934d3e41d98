"""Attention with separate keys and values to the last few tokens."""

from __future__ import annotations

from torch import Tensor

from gsm.cache.store import Window, WindowStore
from gsm.layers.block import LayerOutput, MixerGeometry
from gsm.layers.costs import LayerCost
from gsm.layers.key_value import KeyValue, RangeAttention
from gsm.layers.projections import Shape
from gsm.shapes import last_rows
from gsm.span import Span


class SlidingWindow(RangeAttention):
    """Causal attention to a window of the last W tokens, including the row's own (Beltagy et al., 2020).

    Args:
        shape: widths that all attention layers share.
        geometry: gives the rotary embedding, and the default window.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        window: tokens that a row sees (W); None: the geometry's.
        key_value_heads: key and value heads (G); None: the default of ``KeyValue``.

    Raises:
        ValueError: if ``window`` is below 1.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        geometry: MixerGeometry,
        name: str,
        window: int | None = None,
        key_value_heads: int | None = None,
    ):
        super().__init__(shape, rope=geometry.window_rope(), name=name)
        self.window = geometry.window if window is None else window
        if self.window < 1:
            raise ValueError(f"window must be at least 1, or null for the size's window, got {window}")
        self.key_value = KeyValue(shape, key_value_heads)

    @property
    def reach(self) -> int:
        """Number of earlier positions of its input that a row needs."""
        return self.window - 1

    def start(self, batch: int, kind: str) -> Window:
        """Return an empty window; ``kind`` labels its bytes (``decoder_window``)."""
        return Window.empty(f"{kind}_window", self.window, self.key_value.entry(batch))

    def forward(self, x_BTD: Tensor, span: Span, cache: WindowStore, below: object) -> tuple[Tensor, LayerOutput]:
        """Write keys and values of all T new positions; attend for the last R of them."""
        angles = self.rope.at(span, x_BTD.dtype)
        seen_BEU, cache = cache.extend(self.key_value(x_BTD, angles))
        history = self.key_value.recent(seen_BEU, self.window, span)
        return self.read(last_rows(x_BTD, span.rows), history, angles.last_rows(span.rows)), LayerOutput(cache)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of the layer."""
        key_value = self.key_value.work(f"{kind}_window", self.window)
        return key_value + self.read_cost(self.key_value.projection.out_features, self.window)
