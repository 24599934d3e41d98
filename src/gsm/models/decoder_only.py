"""A decoder-only language model with any sequence mixers, to compare with GSM and the baseline.

    tokens
      |  embedding
    layer 1 .. L_E + L_D     each: a mixer and a feed-forward; the list of mixers repeats over the depth
      |
    norm -> head

Depth, model width, residual connections and feed-forward are those of the baseline. The number of heads and the query
rank are chosen so that the number of parameters matches too; ``parameter_note`` reports the remaining difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from gsm.cache.memory import Memory
from gsm.errors import within
from gsm.layers.block import Mixer
from gsm.layers.costs import Layer
from gsm.layers.feed_forward import FeedForward, SwiGLU
from gsm.layers.residual import HyperConnection, Residual, Streams
from gsm.models.base import Trace
from gsm.models.geometry import Geometry
from gsm.models.matching import ParameterMatched
from gsm.models.schedule import Schedule, non_negative, stack_rows
from gsm.models.stack import Recompute, Stack, balances_of, block_of, caches_of
from gsm.shapes import last_rows
from gsm.span import Span


class DecoderOnly(ParameterMatched):
    """A stack of blocks around mixers.

    Args:
        geometry: widths and depths; encoder and decoder layers together are the depth.
        mixers: by name, a function that makes a mixer; called with ``shape, geometry=..., name=...``.
        layers: names in ``mixers``, one per layer from the first, repeated over the depth.
        query_rank: rank of the low-rank query projection; None: chosen to match the baseline's number of parameters.
        heads: query heads; None: the geometry's, or fewer if matching requires it.
        residual: makes a residual connection; called with the model width, for each mixer and each feed-forward.
        feed_forward: makes the feed-forward of a block; called with the model width and the hidden width.
        feed_forward_convolution: width in tokens of a short convolution before each feed-forward; 1: no convolution.
        recompute: recompute all or some activations of every block in the backward pass, see ``Stack``.

    Raises:
        ValueError: if ``layers`` has a name that is not in ``mixers``, lacks one that is, or is longer than the depth.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        mixers: Mapping[str, Callable[..., Mixer]],
        layers: Sequence[str],
        query_rank: int | None = None,
        heads: int | None = None,
        residual: Callable[[int], Residual] = HyperConnection,
        feed_forward: Callable[[int, int], FeedForward] = SwiGLU,
        feed_forward_convolution: int = 1,
        recompute: Recompute = False,
    ):
        names = repeated(layers, mixers, geometry.depth)
        within(1, 1024, feed_forward_convolution=feed_forward_convolution)
        super().__init__(geometry, partial(DecoderOnly, mixers=mixers, layers=layers), heads, query_rank)
        block = block_of(geometry, feed_forward=feed_forward, residual=residual)
        blocks = []
        for layer, mixer in enumerate(names, 1):
            name = f"decoder/{layer}"
            attention = mixers[mixer](self.shape, geometry=geometry, name=name)
            blocks.append(block(attention, name=name, convolution=feed_forward_convolution))
        self.decoder = Stack(blocks, recompute=recompute)

    @property
    def reach(self) -> int | None:
        """The largest distance in positions at which a token can change an output; None: unlimited."""
        reaches = self.decoder.reaches
        finite = [reach for reach in reaches if reach is not None]
        return sum(finite) + self.decoder.incomplete if len(finite) == len(reaches) else None

    def schedule(self, new: int, rows: int) -> Schedule:
        """Return the rows of each layer."""
        wanted = min(new, rows + self.decoder.incomplete)
        _, *decoder = non_negative(stack_rows(new, wanted, self.decoder.reaches))
        return Schedule([], decoder, decoder_input=new)

    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """Run the stack: from embedded tokens to the last layer's output for the requested rows."""
        rows = self.schedule(x_BTD.shape[1], span.rows).decoder
        streams = Streams.copies(x_BTD, self.decoder.streams)
        streams, decoded = self.decoder(streams, span, rows, memory.decoder)
        after = replace(memory, decoder=caches_of(decoded))
        return Trace(last_rows(streams.mixed_BTD, max(0, span.rows)), after, balances=balances_of(*decoded))

    def layer_costs(self) -> list[Layer]:
        """Return the costs of the layers in execution order."""
        return self.decoder.layer_costs("decoder")

    def empty_memory(self, batch: int) -> dict[str, Any]:
        """Return the empty caches of the mixers."""
        return {"decoder": self.decoder.start(batch, "decoder")}


def repeated(layers: Sequence[str], mixers: Mapping[str, Any], depth: int) -> list[str]:
    """Return the name of the mixer of each of ``depth`` layers.

    Raises:
        ValueError: if ``layers`` has a name that is not in ``mixers``, lacks one that is, or is longer than the depth.
    """
    unknown = sorted(set(layers) - set(mixers))
    if unknown or not layers:
        raise ValueError(
            f"layers must be names of mixers ({', '.join(sorted(mixers)) or 'there are none'}), got {list(layers)}"
        )
    unused = sorted(set(mixers) - set(layers))
    if unused:
        raise ValueError(f"layers must use every mixer, got {list(layers)} without {', '.join(unused)}")
    if len(layers) > depth:
        raise ValueError(f"layers must have at most {depth} mixers, the depth, got {len(layers)}")
    return [layers[layer % len(layers)] for layer in range(depth)]
