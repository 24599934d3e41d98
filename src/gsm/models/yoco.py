"""YOCO, the decoder-decoder that caches once (Sun et al., 2024): GSM's closest relative.

    tokens
      |  embedding
    self-decoder layer 1 .. L_E      each: a mixer with a memory of fixed size
      |---- norm, projection ----> keys and values of every token, made once
      v                                |   |   |
    cross-decoder layer 1 .. L_D     each: queries on these keys and values, no cache
      |
    norm -> head

As in GSM, all layers of the second half read one memory, and prefill runs that half for the last row only. Unlike
GSM's state, this memory holds every token of the history, and attention to it is dense. The self-decoder corresponds
to GSM's encoder and is called ``encoder`` in memories and taps. Its mixer can be chosen: the paper has sliding windows
and gated retention; here a gated DeltaNet replaces the latter (``configs/model/yoco_gated_delta_net.yaml``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from gsm.cache.memory import DenseCache, Memory
from gsm.layers.attention import CrossAttention
from gsm.layers.block import Mixer
from gsm.layers.costs import Layer, LayerCost, products
from gsm.layers.feed_forward import FeedForward, SwiGLU
from gsm.layers.key_value import KeyValue
from gsm.layers.norm import RMSNorm
from gsm.layers.residual import HyperConnection, Residual, Streams
from gsm.layers.sliding_window import SlidingWindow
from gsm.models.base import Trace
from gsm.models.geometry import Geometry
from gsm.models.matching import ParameterMatched
from gsm.models.schedule import Schedule
from gsm.models.stack import Recompute, Stack, balances_of, block_of, caches_of
from gsm.span import Span


class YOCO(ParameterMatched):
    """You Only Cache Once.

    Args:
        geometry: widths and depths; ``encoder_layers`` is the depth of the self-decoder, ``decoder_layers`` that of the
            cross-decoder.
        self_decoder: makes the mixer of each self-decoder layer; called with ``shape, geometry=..., name=...``.
        window: number of tokens in the window of a self-decoder layer, for mixers with a window; None: the mixer's
            default.
        key_value_heads: key and value heads of the cache; None: the default of ``KeyValue``.
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
        self_decoder: Callable[..., Mixer] = SlidingWindow,
        window: int | None = None,
        key_value_heads: int | None = None,
        query_rank: int | None = None,
        heads: int | None = None,
        residual: Callable[[int], Residual] = HyperConnection,
        feed_forward: Callable[[int, int], FeedForward] = SwiGLU,
        recompute: Recompute = False,
    ):
        if window is not None:
            self_decoder = partial(self_decoder, window=window)
        make = partial(YOCO, self_decoder=self_decoder, key_value_heads=key_value_heads)
        super().__init__(geometry, make, heads, query_rank)
        shape = self.shape
        block = block_of(geometry, feed_forward=feed_forward, residual=residual)
        below = [f"encoder/{layer}" for layer in range(1, geometry.encoder_layers + 1)]
        self.encoder = Stack(
            [block(self_decoder(shape, geometry=geometry, name=name), name=name) for name in below],
            recompute=recompute,
        )
        self.cache_norm = RMSNorm(geometry.dim)
        self.key_value = KeyValue(shape, key_value_heads)
        self.rope = geometry.bank_rope()
        cross = [f"decoder/{layer}" for layer in range(geometry.encoder_layers + 1, geometry.depth + 1)]
        self.decoder = Stack(
            [block(CrossAttention(shape, geometry=geometry, name=name), name=name) for name in cross],
            recompute=recompute,
        )

    def schedule(self, new: int, rows: int) -> Schedule:
        """Return the rows of each layer: all positions in the self-decoder, as its output makes the cache; the
        requested rows in the cross-decoder."""
        depths = self.geometry
        wanted = max(0, rows)
        return Schedule([new] * depths.encoder_layers, [wanted] * depths.decoder_layers, decoder_input=wanted)

    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """Run both decoders: from embedded tokens to the cross-decoder's output for the requested rows."""
        rows = self.schedule(x_BTD.shape[1], span.rows)
        streams = Streams.copies(x_BTD, self.encoder.streams)
        streams, encoded = self.encoder(streams, span, rows.encoder, memory.encoder)
        entry_BTU = self.key_value(self.cache_norm(streams.mixed_BTD), self.rope.at(span, x_BTD.dtype))
        (cache,) = memory.decoder
        seen_BFU, slots, cache = cache.extend(entry_BTU, span)
        span = span.last_rows(rows.decoder_input)
        history = self.key_value.history(seen_BFU, slots, span)
        streams = streams.last_rows(rows.decoder_input)
        streams, decoded = self.decoder(streams, span.cut(), rows.decoder, [None] * len(rows.decoder), history)
        after = replace(memory, encoder=caches_of(encoded), decoder=(cache,))
        return Trace(streams.mixed_BTD, after, balances=balances_of(*encoded, *decoded))

    def layer_costs(self) -> list[Layer]:
        """Return the costs of the layers in execution order."""
        key_value = self.key_value.work("decoder_cache")
        cache = Layer("cache", key_value + LayerCost(per_token={"keys and values": products(self.cache_norm)}))
        decoder = [Layer("decoder", block.work("decoder", key_value)) for block in self.decoder]
        return [*self.encoder.layer_costs("encoder"), cache, *decoder]

    def empty_memory(self, batch: int) -> dict[str, Any]:
        """Return the empty caches of the self-decoder's mixers, and the one cache of the cross-decoder."""
        cache = DenseCache.empty("decoder_cache", self.key_value.entry(batch))
        return {"encoder": self.encoder.start(batch, "encoder"), "decoder": (cache,)}
