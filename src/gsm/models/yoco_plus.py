"""YOCO++ (Wu et al., 2026): YOCO with dense attention in the first half, whose caches are mixed with the first one.

    tokens
      |  embedding
    layer 1 ----- keys, values ---+-----------+-- ... --.       dense attention; each layer has a cache, and from
      v                           v           v         v       layer 2 on it is mixed with that of layer 1
    layer 2 .. L_E - 1     layer 2's   layer 3's   layer L_E's
      |                                                 |
    cross-decoder layer 1 .. L_D    <-------------------'       queries on the last of these caches, no other cache
      |
    norm -> head

The first half follows the paper's code: it has dense attention, where YOCO (``gsm.models.yoco``) has windows or a
recurrence. The second half has no key and value projections, so the cache is half as large as a Transformer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from gsm.cache.memory import Memory
from gsm.layers.attention import CrossAttention
from gsm.layers.costs import Layer
from gsm.layers.feed_forward import FeedForward, SwiGLU
from gsm.layers.residual import HyperConnection, Residual, Streams
from gsm.layers.residual_attention import ResidualAttention
from gsm.models.base import Trace
from gsm.models.geometry import Geometry
from gsm.models.matching import ParameterMatched
from gsm.models.schedule import Schedule
from gsm.models.stack import Recompute, Stack, balances_of, block_of, caches_of
from gsm.span import Span


class YOCOPlus(ParameterMatched):
    """YOCO with residual connections between keys and values.

    Args:
        geometry: widths and depths; ``encoder_layers`` is the depth of the first half, ``decoder_layers`` that of the
            cross-decoder.
        key_value_heads: key and value heads of the caches; None: the default of ``KeyValue``.
        scale: weight of the first layer's keys and values in the other caches, see ``ResidualAttention``.
        query_rank: rank of the low-rank query projection; None: chosen to match the baseline's number of parameters.
        heads: query heads; None: the geometry's, or fewer if matching requires it.
        residual: makes a residual connection; called with the model width, for each mixer and each feed-forward.
        feed_forward: makes the feed-forward of a block; called with the model width and the hidden width.
        recompute: recompute all or some activations of every block in the backward pass, see ``Stack``.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        key_value_heads: int | None,
        scale: float,
        query_rank: int | None = None,
        heads: int | None = None,
        residual: Callable[[int], Residual] = HyperConnection,
        feed_forward: Callable[[int, int], FeedForward] = SwiGLU,
        recompute: Recompute = False,
    ):
        make = partial(YOCOPlus, key_value_heads=key_value_heads, scale=scale)
        super().__init__(geometry, make, heads, query_rank)
        block = block_of(geometry, feed_forward=feed_forward, residual=residual)
        mixer = partial(ResidualAttention, self.shape, geometry=geometry, key_value_heads=key_value_heads, scale=scale)
        below = [f"encoder/{layer}" for layer in range(1, geometry.encoder_layers + 1)]
        self.encoder = Stack(
            [block(mixer(name=name, first=name == below[0]), name=name) for name in below], recompute=recompute
        )
        above = [f"decoder/{layer}" for layer in range(geometry.encoder_layers + 1, geometry.depth + 1)]
        self.decoder = Stack(
            [block(CrossAttention(self.shape, geometry=geometry, name=name), name=name) for name in above],
            recompute=recompute,
        )

    def schedule(self, new: int, rows: int) -> Schedule:
        """Return the rows of each layer. The last layer of the first half caches every position and, like the
        cross-decoder, computes outputs for the requested rows only."""
        depths, wanted = self.geometry, max(0, rows)
        encoder = [new] * (depths.encoder_layers - 1) + [wanted]
        return Schedule(encoder, [wanted] * depths.decoder_layers, decoder_input=wanted)

    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """Run both halves: from embedded tokens to the cross-decoder's output for the requested rows."""
        rows = self.schedule(x_BTD.shape[1], span.rows)
        streams = Streams.copies(x_BTD, self.encoder.streams)
        streams, encoded = self.encoder(streams, span, rows.encoder, memory.encoder)
        span, history = span.last_rows(rows.decoder_input), encoded[-1].attended.history
        streams, decoded = self.decoder(streams, span.cut(), rows.decoder, [None] * len(rows.decoder), history)
        after = replace(memory, encoder=caches_of(encoded))
        return Trace(streams.mixed_BTD, after, balances=balances_of(*encoded, *decoded))

    def layer_costs(self) -> list[Layer]:
        """Return the costs of the layers in execution order."""
        *_, last = self.encoder
        assert isinstance(last.attention, ResidualAttention)
        key_value = last.attention.key_value.work("encoder_cache")
        decoder = [Layer("decoder", block.work("decoder", key_value)) for block in self.decoder]
        return [*self.encoder.layer_costs("encoder"), *decoder]

    def empty_memory(self, batch: int) -> dict[str, Any]:
        """Return the empty caches of the first half; the second half has none."""
        return {"encoder": self.encoder.start(batch, "encoder")}
