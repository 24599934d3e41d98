"""Multi-stage history aggregation (paper, section 3.1, equations 7 to 10).

    u_1 = h_1,  u_s = [h_s ; r_{s-1}]             h_s: input of the encoder layer's attention; r_{s-1}: retrieved so
                                                  far (``stage_input`` can take another h, and ``stage_query`` can
                                                  combine the two differently)
    q_s = Query_s(RMSNorm_s(u_s))
    r_s = r_{s-1} + Output_s(Attn(q_s ; window of the layer, bank entries that the retriever selects))

Each stage s belongs to one encoder layer. The encoder does not read the stages' results, so the stages run after it, on
the windows and banks that its layers attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from gsm.layers.attended import Attended
from gsm.layers.block import LayerOutput
from gsm.layers.costs import Layer, LayerCost, products
from gsm.layers.indexer_training import IndexerTraining
from gsm.layers.latent_attention import LatentAttention
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Shape
from gsm.layers.rope import Rope
from gsm.observe import tap
from gsm.shapes import last_rows
from gsm.slots.retriever.base import Retriever
from gsm.slots.stage_input import StageInput
from gsm.slots.stage_query import StageQuery
from gsm.span import Span
from gsm_kernels import IndexerLoss


class Retrieved(NamedTuple):
    """The output of the stages.

    Attributes:
        increments: one [B, R, D] per stage; their sum is the paper's r.
        caches: the cache of each retriever after the call.
        indexer_losses: in training: the loss and recall of each separate indexer, with its name, such as ``stage2``.
    """

    increments: tuple[Tensor, ...]
    caches: tuple[Any, ...]
    indexer_losses: list[tuple[str, IndexerLoss]]


class Stage(LatentAttention):
    """One stage: attention with its own query to the window and the bank of its encoder layer.

    Args:
        dim_in: width of u (U).
        shape: widths that all attention layers share.
        window: window of the encoder layer in tokens (W).
        rope: rotary embedding of that layer.
        retriever: selects the bank entries.
        name: prefix of the stage's taps.
        indexer_training: trains a separate indexer.
    """

    def __init__(
        self,
        dim_in: int,
        shape: Shape,
        *,
        window: int,
        rope: Rope,
        retriever: Retriever,
        name: str,
        indexer_training: IndexerTraining,
    ):
        super().__init__(dim_in, shape, window=window, rope=rope, name=name, indexer_training=indexer_training)
        self.norm = RMSNorm(dim_in)
        self.retriever = retriever

    def forward(
        self, u_BRU: Tensor, span: Span, attended: Attended, cache: Any
    ) -> tuple[Tensor, Any, IndexerLoss | None]:
        """Attend for R rows.

        Args:
            u_BRU: query input u_s.
            span: the rows.
            attended: the window, bank and selection of the encoder layer, for these rows.
            cache: the cache of the retriever.

        Returns:
            The increment r_s - r_{s-1}, [B, R, D]; the retriever's next cache; in training, the loss and recall of the
            stage's indexer (None: it has none).
        """
        x_BRU = self.norm(u_BRU)
        angles = self.rope.at(span, x_BRU.dtype)
        selection, cache = self.retriever(x_BRU, attended, span.position_BT, angles, cache)
        selection = selection.tapped((self, "top_k"), attended.bank)
        attended = self.choose(attended, selection)
        query_BRHC, _ = self.ask(x_BRU)
        indexer_loss = self.indexer_loss(query_BRHC, selection, attended, span, angles)
        increment_BRD = self.read(query_BRHC, attended, span.position_BT, angles)
        return tap((self, "increment"), increment_BRD), cache, indexer_loss

    def work(self, layer: LayerCost) -> LayerCost:
        """Return the cost of the stage, given the cost of its encoder layer."""
        assert layer.window is not None and layer.bank is not None
        per_row = {**self.cost_of_rows(self.norm, self.retriever), "norms": products(self.norm)}
        return LayerCost(per_row, looks=(layer.window,)) + self.retriever.work(layer.bank)


class Aggregation(nn.Module):
    """All stages in order.

    Args:
        layers: number of each stage's encoder layer, counted from 1; [] for no stages.
        shape: widths that all attention layers share.
        window: window of the encoder layers in tokens (W).
        top_k: bank entries that a retriever selects (K).
        ratio: tokens per bank entry (m).
        rope: rotary embedding of the encoder layers with a bank.
        retriever: makes the retriever of each stage; called with ``dim_in, shape, top_k=..., stage=...``.
        stage_input: selects h of a stage.
        stage_query: computes the query input of a stage.
        indexer_training: trains separate indexers.
    """

    def __init__(
        self,
        layers: Sequence[int],
        shape: Shape,
        *,
        window: int,
        top_k: int,
        ratio: int,
        rope: Rope,
        retriever: Callable[..., Retriever],
        stage_input: StageInput,
        stage_query: StageQuery,
        indexer_training: IndexerTraining,
    ):
        super().__init__()
        self.layers, self.ratio = tuple(layers), ratio
        self.stage_input, self.stage_query = stage_input, stage_query
        self.stages = nn.ModuleList()
        for number in range(1, len(self.layers) + 1):
            dim_in = stage_query.width(shape.dim, number)
            stage = Stage(
                dim_in,
                shape,
                window=window,
                rope=rope,
                retriever=retriever(dim_in, shape, top_k=top_k, stage=number),
                name=f"stage/{number}",
                indexer_training=indexer_training,
            )
            self.stages.append(stage)

    def __iter__(self) -> Iterator[Stage]:
        return (cast(Stage, stage) for stage in self.stages)

    def start(self, batch: int) -> tuple[Any, ...]:
        """Return the empty caches of all retrievers."""
        return tuple(stage.retriever.start(batch, self.ratio) for stage in self)

    def layer_costs(self, encoder: Sequence[Layer]) -> list[Layer]:
        """Return the cost of each stage, given the costs of the encoder's layers."""
        numbered = zip(self, self.layers, strict=True)
        return [Layer("stages", stage.work(encoder[layer - 1].work)) for stage, layer in numbered]

    def forward(self, encoded: Sequence[LayerOutput], span: Span, caches: Sequence[Any]) -> Retrieved:
        """Run the stages in order.

        Args:
            encoded: the output of each encoder layer.
            span: the rows that the state writer needs.
            caches: the cache of each retriever.
        """
        increments, after, losses = [], [], []
        retrieved_BRD = None
        for number, (stage, layer, cache) in enumerate(zip(self, self.layers, caches, strict=True), 1):
            layer_output = encoded[layer - 1]
            u_BRU = self.stage_query(last_rows(self.stage_input(layer_output), span.rows), retrieved_BRD)
            increment_BRD, cache, loss = stage(u_BRU, span, layer_output.attended.last_rows(span.rows), cache)
            retrieved_BRD = increment_BRD if retrieved_BRD is None else retrieved_BRD + increment_BRD
            increments.append(increment_BRD)
            after.append(cache)
            if loss is not None:
                losses.append((f"stage{number}", loss))
        return Retrieved(tuple(increments), tuple(after), losses)
