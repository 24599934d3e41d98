"""GSM, the Global State Model (paper, section 3): an encoder that retrieves history in stages, one shared state, and a
decoder that reads it.

    tokens
      |  embedding
    encoder layer 1 .. L_E ---------------------- e ----.
      |  window, bank and Top-K of the stage layers     |
    stage 1 -> .. -> stage S -------- increments --- writer --- z ------> decoder layer 1 .. L_D -> norm -> head
                                                         |                     ^  ^  ^
                                                         '--> state, the last M entries: read by every layer

Only the encoder stores the history. The decoder has no cache: each of its layers reads the same M entries with a new
query. (So it is with the paper's ``state_reader``; the others differ. With ``decoder_start: streams`` the decoder also
gets the encoder's residual streams.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gsm.cache.memory import Memory
from gsm.layers.block import Block
from gsm.layers.costs import Layer
from gsm.layers.feed_forward import FeedForward, SwiGLU
from gsm.layers.indexer_training import KL, IndexerTraining
from gsm.layers.residual import HyperConnection, Residual, Streams
from gsm.models.aggregation import Aggregation
from gsm.models.base import LanguageModel, Trace
from gsm.models.encoder import build_encoder
from gsm.models.geometry import Geometry, check_layers
from gsm.models.schedule import Schedule, gsm_schedule
from gsm.models.stack import Recompute, Stack, balances_of, block_of, caches_of, losses_of_indexers
from gsm.observe import tap
from gsm.shapes import last_rows
from gsm.slots.decoder_start import DecoderStart, State
from gsm.slots.encoder_layer import ATTENTION, EncoderLayer
from gsm.slots.encoder_reading import EncoderReading, TopK
from gsm.slots.retriever.base import Retriever
from gsm.slots.retriever.shared_topk import SharedTopK
from gsm.slots.stage_input import BeforeLayer, StageInput
from gsm.slots.stage_query import Accumulated, StageQuery
from gsm.slots.state_reader.base import StateReader
from gsm.slots.state_reader.shared import Shared
from gsm.slots.writer.additive import Additive
from gsm.slots.writer.base import StateWriter
from gsm.span import Span


class GSM(LanguageModel):
    """The Global State Model.

    Args:
        geometry: widths and depths.
        stages: encoder layers with an aggregation stage; None: the geometry's stages, []: no aggregation.
        state_size: state entries that a decoder row sees (M); None: window + top_k, as many as an encoder row sees.
        encoder_layer: builds the mixer of each encoder layer.
        encoder_reading: decides whether the encoder's attention reads its banks; None: ``TopK``, it does.
        retriever: makes the retriever of a stage, which selects its bank entries; called with
            ``dim_in, shape, top_k=..., stage=...``.
        stage_input: selects the input h_s of a stage; None: ``BeforeLayer``.
        stage_query: computes the query input u_s of a stage; None: ``Accumulated``.
        writer: makes the state writer, which writes the retrieved history into the state; called with
            ``shape, state_size=..., rope=..., parts=...``, and with ``stages=...``, the number of stages, if it takes
            that argument.
        decoder_start: makes the initial residual streams of the decoder; None: ``State``.
        state_reader: builds the attention with which decoder layers read the state; None: ``Shared``.
        residual: makes a residual connection; called with the model width, for each mixer and each feed-forward.
        feed_forward: makes the feed-forward of a block; called with the model width and the hidden width.
        indexer_training: the loss, or the straight-through score, that trains the indexers.
        indexer_weight: weight of the loss of the indexers, if they have one.
        recompute: recompute all or some activations of every block in the backward pass, see ``Stack``.

    Raises:
        ValueError: if ``stages`` has a layer that does not exist or has no bank, ``state_size`` is below 1, the
            retriever uses the encoder's selection although its layers do not read banks, or the writer needs stages and
            there are none.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        stages: Sequence[int] | None = None,
        state_size: int | None = None,
        encoder_layer: EncoderLayer = ATTENTION,
        encoder_reading: EncoderReading | None = None,
        retriever: Callable[..., Retriever] = SharedTopK,
        stage_input: StageInput | None = None,
        stage_query: StageQuery | None = None,
        writer: Callable[..., StateWriter] = Additive,
        decoder_start: DecoderStart | None = None,
        state_reader: StateReader | None = None,
        residual: Callable[[int], Residual] = HyperConnection,
        feed_forward: Callable[[int, int], FeedForward] = SwiGLU,
        indexer_training: IndexerTraining | None = None,
        indexer_weight: float = 1.0,
        recompute: Recompute = False,
    ):
        super().__init__(geometry.vocabulary, geometry.dim, indexer_weight=indexer_weight)
        self.geometry, self.indexer_training = geometry, indexer_training or KL()
        self.state_size = geometry.window + geometry.top_k if state_size is None else state_size
        if self.state_size < 1:
            raise ValueError(f"state_size must be at least 1, or null for window + top_k, got {state_size}")
        layers = check_stages(geometry.stages if stages is None else stages, geometry)
        shape, rope = geometry.shape(), geometry.window_rope()
        block = block_of(geometry, feed_forward=feed_forward, residual=residual)
        reads_bank = (encoder_reading or TopK()).reads_bank
        self.encoder = build_encoder(
            geometry,
            block,
            indexer_training=self.indexer_training,
            encoder_layer=encoder_layer,
            reads_bank=reads_bank,
            recompute=recompute,
        )
        self.aggregation = Aggregation(
            layers,
            shape,
            window=geometry.window,
            top_k=geometry.top_k,
            ratio=geometry.encoder_ratio,
            rope=geometry.bank_rope(),
            retriever=retriever,
            stage_input=stage_input or BeforeLayer(),
            stage_query=stage_query or Accumulated(),
            indexer_training=self.indexer_training,
        )
        if not reads_bank:
            check_retrievers(self.aggregation)
        reader = state_reader or Shared()
        stage_count = {"stages": len(layers)} if takes(writer, "stages") else {}
        self.writer = writer(shape, state_size=self.state_size, rope=rope, parts=reader.parts, **stage_count)
        check_writer(self.writer, layers)
        blocks: list[Block] = []
        for layer in range(1, geometry.decoder_layers + 1):
            name = f"decoder/{geometry.encoder_layers + layer}"
            attention = reader.layer(
                shape,
                layer=layer,
                layers=geometry.decoder_layers,
                state_size=self.state_size,
                slots=self.writer.slots,
                rope=rope,
                name=name,
            )
            blocks.append(block(attention, name=name))
        self.decoder_start = decoder_start or State()
        self.decoder = Stack(blocks, recompute=recompute)
        self.indexer_training.freeze_untrained(self)

    def schedule(self, new: int, rows: int) -> Schedule:
        """Return the number of rows of each layer, of the stages and of the state."""
        return gsm_schedule(
            new,
            rows,
            encoder=self.encoder.reaches,
            decoder=self.decoder.reaches,
            state_size=self.writer.positions,
            writer_reach=self.writer.reach,
            incomplete=self.encoder.incomplete,
        )

    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """Run encoder, stages, writer and decoder: from embedded tokens to the output of the requested rows."""
        rows = self.schedule(x_BTD.shape[1], span.rows)
        streams = Streams.copies(x_BTD, self.encoder.streams)
        streams, encoded = self.encoder(streams, span, rows.encoder, memory.encoder)
        span, streams = span.last_rows(rows.writer).cut(), streams.last_rows(rows.writer)
        retrieved = self.aggregation(encoded, span, memory.stages)
        streams = streams._replace(mixed_BTD=tap("state/e", streams.mixed_BTD))
        z_BRD, state, state_cache = self.writer(
            streams.mixed_BTD, retrieved.increments, span.last_rows(rows.state), memory.state
        )
        span = span.last_rows(rows.decoder_input).cut()
        streams = self.decoder_start(streams.last_rows(rows.decoder_input), last_rows(z_BRD, rows.decoder_input))
        streams, decoded = self.decoder(streams, span, rows.decoder, memory.decoder, state)
        after = replace(
            memory,
            encoder=caches_of(encoded),
            stages=retrieved.caches,
            state=state_cache,
            decoder=caches_of(decoded),
        )
        return Trace(
            streams.mixed_BTD,
            after,
            indexer_losses=losses_of_indexers(encoded, "encoder") + retrieved.indexer_losses,
            metrics=self._norms(retrieved.increments),
            balances=balances_of(*encoded, *decoded),
        )

    def layer_costs(self) -> list[Layer]:
        """Return the costs of the layers in execution order."""
        encoder = self.encoder.layer_costs("encoder")
        return [*encoder, *self.aggregation.layer_costs(encoder), *self.decoder.layer_costs("decoder")]

    def empty_memory(self, batch: int) -> dict[str, Any]:
        """Return the empty windows and banks of the encoder, the index keys of separate indexers, the shared state, and
        the caches of the decoder layers (none with the paper's ``state_reader``)."""
        return {
            "encoder": self.encoder.start(batch, "encoder"),
            "stages": self.aggregation.start(batch),
            "state": self.writer.start(batch),
            "decoder": self.decoder.start(batch, "decoder"),
        }

    def state_bytes(self, memory: Memory) -> int:
        """Return the bytes of the shared state and of the caches of the decoder's layers."""
        return memory.decoder_bytes()

    def _norms(self, increments: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the mean norm of r_s, the sum of the increments up to stage s, for each stage; empty outside of
        training."""
        if not self.training or not increments:
            return {}
        retrieved_SBRD = torch.stack(increments).detach().cumsum(dim=0)
        norm_S = retrieved_SBRD.norm(dim=-1).mean(dim=(1, 2))
        return {f"retrieved_norm/stage{stage}": norm for stage, norm in enumerate(norm_S, 1)}


def check_gsm(model: object, name: str = "") -> None:
    """Raise ValueError unless a model is a GSM; ``name`` stands for that of its class in the message."""
    if not isinstance(model, GSM):
        raise ValueError(f"model must be a GSM, got {name or type(model).__name__}")


def check_stages(stages: Sequence[int], geometry: Geometry) -> list[int]:
    """Return the stages as a list.

    Raises:
        ValueError: if they are not ascending numbers of encoder layers with a bank.
    """
    first = min(geometry.bank_layers)
    bankless = [layer for layer in stages if layer < first]
    if bankless:
        raise ValueError(f"stages must be layers from {first}, the first with a bank, got {list(stages)}")
    check_layers("stages", stages, first, geometry.encoder_layers)
    return list(stages)


def check_retrievers(aggregation: Aggregation) -> None:
    """Raise ValueError if a retriever uses the encoder's selection. Called if the encoder does not read its banks."""
    followers = [stage.retriever for stage in aggregation if stage.retriever.follows_encoder]
    if followers:
        raise ValueError(
            "retriever must make its own selection, as separate_indexer does, because encoder_reading=window_only "
            f"has no selection to share, got {type(followers[0]).__name__}; or use stages=[]"
        )


def takes(factory: Callable[..., object], name: str) -> bool:
    """Return whether ``factory`` takes the keyword ``name``."""
    parameters = inspect.signature(factory).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def check_writer(writer: StateWriter, stages: Sequence[int]) -> None:
    """Raise ValueError if a writer needs stages and the model has none."""
    if writer.needs_stages and not stages:
        raise ValueError(
            "writer must be one that needs no stages, such as additive, with model.stages=[], got "
            f"{type(writer).__name__}"
        )
