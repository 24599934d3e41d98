"""Dense attention to all previous tokens: ``Attention`` (``model/mixer``), and ``CrossAttention`` for YOCO's second
half.

Both follow the interface ``gsm.layers.block.Mixer``.
"""

from __future__ import annotations

from torch import Tensor

from gsm.cache.memory import DenseCache
from gsm.layers.block import LayerOutput, MixerGeometry
from gsm.layers.costs import LayerCost
from gsm.layers.key_value import History, KeyValue, RangeAttention
from gsm.layers.linear import Linear, together
from gsm.layers.projections import Shape
from gsm.layers.rope import Rope
from gsm.shapes import last_rows
from gsm.span import Span


class Attention(RangeAttention):
    """The Transformer's attention: dense and causal, with rotary positions and grouped key and value heads (Vaswani et
    al., 2017; Su et al., 2021; Ainslie et al., 2023).

    Args:
        shape: widths that all attention layers share.
        geometry: gives the rotary embedding.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        key_value_heads: key and value heads (G); None: the default of ``KeyValue``.
        rotary: whether queries and keys are rotated. Without rotation, other layers must encode positions (Kimi Team,
            2025).
    """

    reach = None

    def __init__(
        self,
        shape: Shape,
        *,
        geometry: MixerGeometry,
        name: str,
        key_value_heads: int | None = None,
        rotary: bool = True,
    ):
        super().__init__(shape, rope=geometry.bank_rope() if rotary else Rope(0, base=1.0), name=name)
        self.key_value = KeyValue(shape, key_value_heads)

    @property
    def one_input(self) -> tuple[Linear, Linear]:
        """The maps of the same input, for ``gsm.layers.linear.side_by_side``."""
        return self.key_value.projection, self.query.down

    def start(self, batch: int, kind: str) -> DenseCache:
        """Return an empty cache; ``kind`` labels its bytes (``decoder_cache``)."""
        return DenseCache.empty(f"{kind}_cache", self.key_value.entry(batch))

    def forward(self, x_BTD: Tensor, span: Span, cache: DenseCache, below: object) -> tuple[Tensor, LayerOutput]:
        """Write keys and values of all T new positions; attend for the last R of them."""
        angles = self.rope.at(span, x_BTD.dtype)
        all_rows = span.rows == x_BTD.shape[1]
        projected_BTU, down_BRQ = together(x_BTD, *self.one_input) if all_rows else (None, None)
        seen_BFU, slots, cache = cache.extend(self.key_value(x_BTD, angles, projected_BTU), span)
        history = self.key_value.history(seen_BFU, slots, span)
        x_BRD, angles = last_rows(x_BTD, span.rows), angles.last_rows(span.rows)
        return self.read(x_BRD, history, angles, down_BRQ), LayerOutput(cache)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of the layer."""
        return self.key_value.work(f"{kind}_cache") + self.read_cost(self.key_value.projection.out_features)


class CrossAttention(RangeAttention):
    """A layer of YOCO's cross-decoder: attention to keys and values of another part of the model, without a cache.

    Args:
        shape: widths that all attention layers share.
        geometry: gives the rotary embedding, which must be that of the keys.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
    """

    reach = 0

    def __init__(self, shape: Shape, *, geometry: MixerGeometry, name: str):
        super().__init__(shape, rope=geometry.bank_rope(), name=name)

    def start(self, batch: int, kind: str) -> None:
        """Return None, because this layer has no cache: the model stores the keys and values."""
        return None

    def forward(self, x_BTD: Tensor, span: Span, cache: None, below: History) -> tuple[Tensor, LayerOutput]:
        """Attend to ``below``, the keys and values that the rows see, for the last R of T positions; pass it on."""
        angles = self.rope.at(span, x_BTD.dtype).last_rows(span.rows)
        return self.read(last_rows(x_BTD, span.rows), below.last_rows(span.rows), angles), LayerOutput(None, below)

    def work(self, kind: str, below: LayerCost) -> LayerCost:
        """Return the cost of attending to the history stored by ``below``."""
        (history,) = below.stores
        return self.read_cost(history.width)
