"""The paper's baseline: the text backbone of DeepSeek-V4.1-Flash at small scale (causal encoder-decoder, CSA2).

    tokens
      |  embedding
    encoder layer 1 .. L_E       window-only layers, then groups of layers that share a bank of one entry per m tokens
      |
    decoder layer 1 (Full)       builds a bank of one entry per token from the encoder's output
    decoder layer 2 .. L_D       Reindex layers make a new selection from it, Reuse layers use the last selection
      |
    norm -> head

A bank is the memory of distant tokens, from which an indexer selects the Top-K entries for each row. The encoder is the
same as in GSM, without stages and shared state. Every decoder layer has its own window, and the decoder's bank grows
with the history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from gsm.cache.memory import Memory
from gsm.layers.costs import Layer
from gsm.layers.feed_forward import FeedForward, SwiGLU
from gsm.layers.indexer_training import KL, IndexerTraining
from gsm.layers.residual import HyperConnection, Residual, Streams
from gsm.layers.sparse import Role, SparseAttention
from gsm.models.base import LanguageModel, Trace
from gsm.models.encoder import build_encoder
from gsm.models.geometry import Geometry, check_layers
from gsm.models.schedule import Schedule, non_negative, stack_rows
from gsm.models.stack import Recompute, Stack, balances_of, block_of, caches_of, losses_of_indexers
from gsm.span import Span


class Baseline(LanguageModel):
    """DeepSeek-V4.1-Flash-like encoder-decoder.

    Args:
        geometry: widths and depths.
        candidate_pool: let the decoder's Reindex layers search only the ``candidate_blocks`` best blocks of 8 entries,
            which the Full layer selects (section 2.1). This has no effect while all entries of the bank fit into these
            blocks, as in main training at every size.
        residual: makes a residual connection; called with the model width, for each mixer and each feed-forward.
        feed_forward: makes the feed-forward of a block; called with the model width and the hidden width.
        indexer_training: the loss, or the straight-through score, that trains the indexers.
        indexer_weight: weight of the loss of the indexers, if they have one.
        recompute: recompute all or some activations of every block in the backward pass, see ``Stack``.

    Raises:
        ValueError: if ``decoder_full`` is not the first decoder layer, or ``decoder_reindex`` not layers above it.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        candidate_pool: bool = True,
        residual: Callable[[int], Residual] = HyperConnection,
        feed_forward: Callable[[int, int], FeedForward] = SwiGLU,
        indexer_training: IndexerTraining | None = None,
        indexer_weight: float = 1.0,
        recompute: Recompute = False,
    ):
        super().__init__(geometry.vocabulary, geometry.dim, indexer_weight=indexer_weight)
        self.geometry, self.indexer_training = geometry, indexer_training or KL()
        block = block_of(geometry, feed_forward=feed_forward, residual=residual)
        self.encoder = build_encoder(geometry, block, indexer_training=self.indexer_training, recompute=recompute)
        shape, rope = geometry.shape(), geometry.bank_rope()
        blocks = []
        for layer, role in enumerate(decoder_roles(geometry), geometry.encoder_layers + 1):
            name = f"decoder/{layer}"
            attention = SparseAttention(
                shape,
                role,
                window=geometry.window,
                top_k=geometry.top_k,
                ratio=geometry.decoder_ratio,
                rope=rope,
                name=name,
                pool_blocks=geometry.candidate_blocks if candidate_pool and role == "full" else None,
                indexer_training=self.indexer_training,
            )
            blocks.append(block(attention, name=name))
        self.decoder = Stack(blocks, recompute=recompute)
        self.indexer_training.freeze_untrained(self)

    def schedule(self, new: int, rows: int) -> Schedule:
        """Return the rows of each layer. The decoder's bank needs the output of the encoder at all positions; the
        decoder layers compute fewer rows in a prefill."""
        decoder_input, *decoder = non_negative(stack_rows(new, rows, self.decoder.reaches))
        return Schedule([new] * self.geometry.encoder_layers, decoder, decoder_input=decoder_input)

    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """Run encoder and decoder: from embedded tokens to the last layer's output for the requested rows."""
        rows = self.schedule(x_BTD.shape[1], span.rows)
        streams = Streams.copies(x_BTD, self.encoder.streams)
        streams, encoded = self.encoder(streams, span, rows.encoder, memory.encoder)
        streams, decoded = self.decoder(streams, span.last_rows(rows.decoder_input), rows.decoder, memory.decoder)
        after = replace(memory, encoder=caches_of(encoded), decoder=caches_of(decoded))
        losses = losses_of_indexers(encoded, "encoder")
        losses += losses_of_indexers(decoded, "decoder", self.geometry.encoder_layers + 1)
        return Trace(streams.mixed_BTD, after, losses, balances=balances_of(*encoded, *decoded))

    def layer_costs(self) -> list[Layer]:
        """Return the costs of the layers in execution order."""
        return [*self.encoder.layer_costs("encoder"), *self.decoder.layer_costs("decoder")]

    def empty_memory(self, batch: int) -> dict[str, Any]:
        """Return the empty windows of all layers, the banks of the encoder, and the bank of the decoder."""
        return {"encoder": self.encoder.start(batch, "encoder"), "decoder": self.decoder.start(batch, "decoder")}


def decoder_roles(geometry: Geometry) -> list[Role]:
    """Return the role of each decoder layer: ``full``, ``reindex`` or ``reuse``.

    Raises:
        ValueError: if ``decoder_full`` is not the first decoder layer, or ``decoder_reindex`` not layers above it.
    """
    first, last = geometry.encoder_layers + 1, geometry.depth
    if geometry.decoder_full != first:
        raise ValueError(
            f"decoder_full must be {first}, the first decoder layer, which gets the encoder's output, got "
            f"{geometry.decoder_full}"
        )
    check_layers("decoder_reindex", geometry.decoder_reindex, first + 1, last)
    reindex, layers = geometry.decoder_reindex, range(first, last + 1)
    return ["full" if i == first else "reindex" if i in reindex else "reuse" for i in layers]
