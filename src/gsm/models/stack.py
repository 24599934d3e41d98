"""A stack of blocks: the encoder or the decoder of any model. A schedule sets how many rows each block computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gsm.layers.block import Block, LayerOutput
from gsm.layers.costs import Layer
from gsm.layers.feed_forward import Balance, FeedForward
from gsm.layers.projections import Indexer
from gsm.layers.residual import Residual, Streams
from gsm.models.geometry import Geometry
from gsm.observe import patching
from gsm.span import Span
from gsm_kernels import IndexerLoss

Recompute = bool | Literal["selective"]
# Operations whose outputs selective recomputation saves: matmuls with weights, attention, searches and kernels that
# contain these are expensive. The others are recomputed: norms, rotations, activations and the mixing of streams are
# cheap and make up most of a block's activations. Batched matmuls are recomputed too: the only one with weights is
# small, and the reference kernels overwrite the outputs of the others.
SAVED = {
    *(f"aten.{name}" for name in ("mm", "addmm", "_grouped_mm", "topk", "sort")),
    *(f"aten._scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    "aten._scaled_dot_product_flash_attention_for_cpu",
    *(f"gsm_kernels.{name}" for name in ("attend", "attend_few_rows", "grouped_products", "index_top_k")),
    *(f"gsm_kernels.{name}" for name in ("candidate_pool", "indexer_kl", "score_slots")),
    *(f"gsm_kernels.{name}_cpu" for name in ("index_top_k", "candidate_pool")),
}
# Saved even where a whole block is recomputed: an indexer's loss, whose gradients are computed together with it.
SAVED_ALWAYS = {"gsm_kernels.indexer_kl"}


class Stack(nn.Module):
    """Blocks in order. A recurrence has no entries; the stack passes the entries of the layer below it on.

    Args:
        blocks: the layers.
        recompute: True: run every block again in the backward pass instead of saving its activations (in training only;
            the losses of indexers are saved, ``SAVED_ALWAYS``). ``selective``: save the outputs of expensive operations
            (``SAVED``) and recompute the others.

    Raises:
        ValueError: if ``recompute`` is none of these.
    """

    def __init__(self, blocks: Sequence[Block], *, recompute: Recompute = False):
        super().__init__()
        if recompute not in (False, True, "selective"):
            raise ValueError(f"recompute must be true, false or selective, got {recompute!r}")
        self.blocks = nn.ModuleList(blocks)
        self.recompute = recompute
        # Whether each layer has an indexer, whose loss is saved.
        self.searches = [any(isinstance(part, Indexer) for part in block.modules()) for block in blocks]
        # For each layer, the number of earlier positions of its input that a row needs, plus the rows of that input
        # that are incomplete in a pruned call; None: all positions.
        self.reaches: list[int | None] = []
        self.incomplete = 0  # rows at the beginning of a pruned call's output that lack tokens of a convolution
        for block in blocks:
            reach = block.attention.reach
            self.reaches.append(None if reach is None else reach + self.incomplete)
            self.incomplete = block.incomplete

    def __iter__(self) -> Iterator[Block]:
        return (cast(Block, block) for block in self.blocks)

    def start(self, batch: int, kind: str) -> tuple[Any, ...]:
        """Return the empty caches of all layers, with their bytes labelled ``kind``."""
        return tuple(block.start(batch, kind) for block in self)

    @property
    def streams(self) -> int:
        """Number of residual streams."""
        return next(iter(self)).attention_residual.streams

    def layer_costs(self, place: str) -> list[Layer]:
        """Return the cost of each layer; ``place`` is ``encoder`` or ``decoder``."""
        layers, below = [], None
        for block in self:
            below = block.work(place, below).above(below)
            layers.append(Layer(place, below))
        return layers

    def forward(
        self, streams: Streams, span: Span, rows: Sequence[int], caches: Sequence[Any], below: Any = None
    ) -> tuple[Streams, list[LayerOutput]]:
        """Run every block for its rows.

        Args:
            streams: residual streams of the new positions.
            span: the new positions.
            rows: number of rows of each layer; no layer may have more than the one below it.
            caches: the cache of each layer.
            below: entries from outside of the stack that its first layer may attend to, such as GSM's state.

        Returns:
            The residual streams of the last layer's rows, and the other outputs of each layer.
        """
        outputs: list[LayerOutput] = []
        for block, searches, layer_rows, cache in zip(self, self.searches, rows, caches, strict=True):
            span = span.last_rows(layer_rows)
            if not span.position_BT.shape[1]:  # no positions enter the layer: pass ``below`` on
                empty_BTD = streams.mixed_BTD
                out = LayerOutput(cache, below, layer_input_BTD=empty_BTD, layer_output_BRD=empty_BTD)
            elif self.recompute and self.training and not patching():  # a patch may have ended before the backward
                options: dict[str, Any] = {}
                if self.recompute == "selective":
                    options = {"context_fn": partial(create_selective_checkpoint_contexts, SELECTIVE)}
                elif searches and not torch.compiler.is_compiling():  # torch.compile takes no policy here
                    options = {"context_fn": partial(create_selective_checkpoint_contexts, LOSSES)}
                streams, out = checkpoint(block, streams, span, cache, below, use_reentrant=False, **options)
            else:
                streams, out = block(streams, span, cache, below)
            if out.attended is None and below is not None:
                out = out._replace(attended=below.last_rows(span.rows))
            outputs.append(out)
            below, span = out.attended, span.cut()
        return streams, outputs


def _saving(names: Set[str]) -> Callable[..., CheckpointPolicy]:
    """Return the checkpoint policy that saves the outputs of the named operations and recomputes the others."""

    def policy(_: Any, operation: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = str(operation.overloadpacket) in names
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


SELECTIVE, LOSSES = _saving(SAVED), _saving(SAVED_ALWAYS)


def block_of(
    geometry: Geometry, *, feed_forward: Callable[[int, int], FeedForward], residual: Callable[[int], Residual]
) -> Callable[..., Block]:
    """Return a function that builds a ``Block`` of the geometry's widths around a mixer; it takes the mixer, ``name``
    and the other options of ``Block``.

    Args:
        geometry: gives the model width and the hidden width.
        feed_forward: makes the feed-forward of a block; called with the model width and the hidden width.
        residual: makes a residual connection; called with the model width, for the mixer and for the feed-forward.
    """

    def make_feed_forward(dim: int) -> FeedForward:
        return feed_forward(dim, geometry.feed_forward_dim)

    return partial(Block, geometry.dim, feed_forward=make_feed_forward, residual=residual)


def caches_of(outputs: Sequence[LayerOutput]) -> tuple[Any, ...]:
    """Return the cache of each layer after the call."""
    return tuple(out.cache for out in outputs)


def losses_of_indexers(outputs: Sequence[LayerOutput], name: str, first: int = 1) -> list[tuple[str, IndexerLoss]]:
    """Return the loss and recall of each layer's indexer with the layer's name, such as ``encoder3``; empty outside of
    training.

    Args:
        outputs: the outputs of the layers.
        name: ``encoder`` or ``decoder``.
        first: number of the first layer.
    """
    numbered = enumerate(outputs, first)
    return [(f"{name}{layer}", out.indexer_loss) for layer, out in numbered if out.indexer_loss is not None]


def balances_of(*outputs: LayerOutput) -> list[Balance]:
    """Return the expert loads of every layer with experts; empty outside of training."""
    return [out.balance for out in outputs if out.balance is not None]
