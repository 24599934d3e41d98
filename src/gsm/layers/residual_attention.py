"""Attention whose keys and values are mixed with those of the first layer of its stack: YOCO++ (Wu et al., 2026,
"YOCO++: Enhancing YOCO with KV Residual Connections for Efficient LLM Inference")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gsm.cache.memory import DenseCache
from gsm.costs.primitives import LayerCost, products
from gsm.layers.attention import Attention
from gsm.layers.block import LayerOutput, MixerGeometry
from gsm.layers.key_value import History
from gsm.layers.projections import Shape
from gsm.shapes import last
from gsm.span import Span


@dataclass(frozen=True)
class HandedOn:
    """What a layer hands to those above.

    Attributes:
        first_BTU: keys and values that the first layer has made of the new positions.
        history: what this layer's rows have attended to.
    """

    first_BTU: Tensor
    history: History


class ResidualAttention(Attention):
    """Dense attention of which layer l > 1 keeps ``k = s (a_1 k^(1) + a_2 k^(l))``, with rotated keys, and values
    likewise with weights of their own; the first layer keeps its own. Weights start at 0 and 1 / s: as plain attention.

    Args:
        shape: shared widths.
        geometry: gives the rotation.
        name: what its taps are called.
        key_value_heads: key and value heads (G); None: as many as ``KeyValue`` says.
        scale: by how much less than they do weights are kept (s): an optimiser moves them so much faster.
        first: whether this is the first layer, which has no weights.

    Raises:
        ValueError: for a scale that is not above 0.
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
        if scale <= 0:
            raise ValueError(f"scale must lie above 0, got {scale}")
        self.scale = scale
        self.key_mix = None if first else nn.Parameter(torch.tensor([0.0, 1 / scale]))
        self.value_mix = None if first else nn.Parameter(torch.tensor([0.0, 1 / scale]))

    def forward(
        self, x_BTD: Tensor, span: Span, cache: DenseCache, below: HandedOn | None
    ) -> tuple[Tensor, LayerOutput]:
        """Writes keys and values of all T new positions, mixed with those that ``below`` brings, reads for the last R
        of them, and hands both on."""
        angles = self.rope.at(span, x_BTD.dtype)
        entry_BTU = self.key_value(x_BTD, angles)
        first_BTU = entry_BTU if below is None else below.first_BTU
        seen_BFU, slots, cache = cache.extend(self.mixed(first_BTU, entry_BTU), span)
        history = self.key_value.history(seen_BFU, slots, span)
        update_BRD = self.read(last(x_BTD, span.rows), history, angles.last(span.rows))
        return update_BRD, LayerOutput(cache, HandedOn(first_BTU, history))

    def mixed(self, first_BTU: Tensor, entry_BTU: Tensor) -> Tensor:
        """Keys and values as they are kept."""
        if self.key_mix is None or self.value_mix is None:
            return entry_BTU
        pairs = zip(first_BTU.chunk(2, dim=-1), entry_BTU.chunk(2, dim=-1), (self.key_mix, self.value_mix), strict=True)
        return torch.cat([self.scale * (mix[0] * first + mix[1] * own) for first, own, mix in pairs], dim=-1)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """What it costs: as plain attention, but for a few weights."""
        mixing = {"keys and values": products(self.key_mix, self.value_mix)}
        return super().work(kind, below) + LayerCost(per_token=mixing)
