"""A decoder-only language model of any sequence mixers: what GSM and the baseline are compared with.

    tokens
      |  embedding
    layer 1 .. L_E + L_D     each: a mixer of the list, a feed-forward; the list repeats over the depth
      |
    norm -> head

Depth, model width, residual and feed-forward are those of the baseline. Heads and query rank are chosen so that the
number of parameters is, too; how near that comes tells ``parameter_note``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from gsm.cache.memory import Memory
from gsm.costs.primitives import Layer
from gsm.layers.block import SlotMixer
from gsm.layers.feed_forward import FeedForward, SwiGLU
from gsm.layers.residual import HyperConnection, Residual, Streams
from gsm.models.base import Trace
from gsm.models.geometry import Geometry
from gsm.models.matching import ParameterMatched
from gsm.models.schedule import Schedule, at_least_none, stack_rows
from gsm.models.stack import Recompute, Stack, balances_of, block_of, caches_of
from gsm.span import Span


class DecoderOnly(ParameterMatched):
    """A stack of blocks around mixers.

    Args:
        geometry: widths and depths; encoder and decoder layers together are the depth.
        mixers: the kinds of mixers by name; each called with ``shape, geometry=..., name=...``.
        layers: their names in order, repeated over the depth.
        query_rank: rank of the queries; None: as many parameters as the baseline has.
        heads: query heads; None: the geometry's, or fewer where the baseline's parameters ask for it.
        residual: called with the width for every site.
        feed_forward: called with width and hidden width for every block.
        recompute: recompute activations of every block in the backward pass, or some of them, see ``Stack``.

    Raises:
        ValueError: for layers that name no mixer, mixers that no layer names, or fewer layers than are listed.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        mixers: Mapping[str, Callable[..., SlotMixer]],
        layers: Sequence[str],
        query_rank: int | None = None,
        heads: int | None = None,
        residual: Callable[[int], Residual] = HyperConnection,
        feed_forward: Callable[[int, int], FeedForward] = SwiGLU,
        recompute: Recompute = False,
    ):
        names = repeated(layers, mixers, geometry.depth)
        super().__init__(geometry, partial(DecoderOnly, mixers=mixers, layers=layers), heads, query_rank)
        block = block_of(geometry, feed_forward=feed_forward, residual=residual)
        blocks = []
        self.reaches: list[int | None] = []  # of each layer
        for layer, name in enumerate(names, 1):
            mixer = mixers[name](self.shape, geometry=geometry, name=f"decoder/{layer}")
            self.reaches.append(mixer.reach)
            blocks.append(block(mixer))
        self.decoder = Stack(blocks, recompute=recompute)

    @property
    def reach(self) -> int | None:
        """How many positions back a token can change an output; None: any number."""
        known = [reach for reach in self.reaches if reach is not None]
        return sum(known) if len(known) == len(self.reaches) else None

    def schedule(self, new: int, rows: int) -> Schedule:
        """Rows of each layer."""
        _, *decoder = at_least_none(stack_rows(new, rows, self.reaches))
        return Schedule([], decoder, decoder_input=new)

    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """From embedded tokens to the last layer's output for the rows asked for."""
        rows = self.schedule(x_BTD.shape[1], span.rows).decoder
        streams = Streams.copies(x_BTD, self.decoder.streams)
        streams, decoded = self.decoder(streams, span, rows, memory.decoder)
        after = replace(memory, decoder=caches_of(decoded))
        return Trace(streams.mixed_BTD, after, balances=balances_of(*decoded))

    def layer_costs(self) -> list[Layer]:
        """What each layer costs, in the order in which they run."""
        return self.decoder.layer_costs("decoder")

    def empty_memory(self, batch: int) -> dict[str, Any]:
        """What the mixers keep."""
        return {"decoder": self.decoder.start(batch, "decoder")}


def repeated(layers: Sequence[str], mixers: Mapping[str, Any], depth: int) -> list[str]:
    """The name of each layer's mixer. Raises ValueError unless layers and mixers name one another."""
    unknown = sorted(set(layers) - set(mixers))
    if unknown or not layers:
        raise ValueError(f"layers {list(layers)} must name mixers; there are {', '.join(sorted(mixers)) or 'none'}")
    idle = sorted(set(mixers) - set(layers))
    if idle:
        raise ValueError(f"mixers {idle} are named by no layer of {list(layers)}; name them there or leave them out")
    if len(layers) > depth:
        raise ValueError(f"layers lists {len(layers)} mixers for {depth} layers; list at most as many")
    return [layers[layer % len(layers)] for layer in range(depth)]
