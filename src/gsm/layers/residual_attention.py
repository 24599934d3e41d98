"""Dense attention whose keys and values are mixed with those of the first layer: YOCO++ (Wu et al., 2026, "YOCO++:
Enhancing YOCO with KV Residual Connections for Efficient LLM Inference")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gsm.cache.memory import DenseCache
from gsm.layers.attention import Attention
from gsm.layers.block import LayerOutput, MixerGeometry
from gsm.layers.costs import LayerCost, products
from gsm.layers.key_value import History
from gsm.layers.projections import Shape
from gsm.shapes import last_rows
from gsm.span import Span


@dataclass(frozen=True)
class LayerKeyValues:
    """The tensors that a layer passes to the layers above.

    Attributes:
        first_BTU: the keys and values that the first layer made for the new positions.
        history: the keys and values that the rows of this layer attended to.
    """

    first_BTU: Tensor
    history: History


class ResidualAttention(Attention):
    """Dense attention in which layer l > 1 stores the keys ``k = s (a_1 k^(1) + a_2 k^(l))``, mixed after rotation, and
    values that are mixed in the same way with other weights. The first layer stores its keys and values unmixed. The
    weights a_1 and a_2 start at 0 and 1 / s, which is plain attention.

    Args:
        shape: widths that all attention layers share.
        geometry: gives the rotary embedding.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        key_value_heads: key and value heads (G); None: the default of ``KeyValue``.
        scale: factor of the stored weights (s); an optimiser step changes their effect s times as much.
        first: whether this is the first layer, which has no weights.

    Raises:
        ValueError: if ``scale`` is not in (0, 1e6].
    """

    def __init__(
        self,
        shape: Shape,
        *,
        geometry: MixerGeometry,
        name: str,
        key_value_heads: int | None,
        scale: float,
        first: bool,
    ):
        super().__init__(shape, geometry=geometry, name=name, key_value_heads=key_value_heads)
        if not 0 < scale <= 1e6:
            raise ValueError(f"scale must be in (0, 1e6], got {scale}")
        self.scale = scale
        self.key_mix = None if first else nn.Parameter(torch.tensor([0.0, 1 / scale]))
        self.value_mix = None if first else nn.Parameter(torch.tensor([0.0, 1 / scale]))

    def forward(
        self, x_BTD: Tensor, span: Span, cache: DenseCache, below: LayerKeyValues | None
    ) -> tuple[Tensor, LayerOutput]:
        """Write keys and values of all T new positions, mixed with the first layer's from ``below``; attend for the
        last R of them; pass both on."""
        angles = self.rope.at(span, x_BTD.dtype)
        entry_BTU = self.key_value(x_BTD, angles)
        first_BTU = entry_BTU if below is None else below.first_BTU
        seen_BFU, slots, cache = cache.extend(self.mixed(first_BTU, entry_BTU), span)
        history = self.key_value.history(seen_BFU, slots, span)
        update_BRD = self.read(last_rows(x_BTD, span.rows), history, angles.last_rows(span.rows))
        return update_BRD, LayerOutput(cache, LayerKeyValues(first_BTU, history))

    def mixed(self, first_BTU: Tensor, entry_BTU: Tensor) -> Tensor:
        """Mix keys and values with the first layer's."""
        if self.key_mix is None or self.value_mix is None:
            return entry_BTU
        pairs = zip(first_BTU.chunk(2, dim=-1), entry_BTU.chunk(2, dim=-1), (self.key_mix, self.value_mix), strict=True)
        return torch.cat([self.scale * (mix[0] * first + mix[1] * new) for first, new, mix in pairs], dim=-1)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of plain attention and of the few weights a_1, a_2."""
        mixing = {"keys and values": products(self.key_mix, self.value_mix)}
        return super().work(kind, below) + LayerCost(per_token=mixing)
