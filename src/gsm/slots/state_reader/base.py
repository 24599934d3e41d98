"""How decoder layers read the shared state: the config group ``model/state_reader`` (paper, section 3.3).

A reader names the parts of the state that it needs (``parts``) and builds the attention of each decoder layer
(``layer``). To add a reader, define both; memory, costs, parameters and taps follow from them. To change the attention,
override ``StateAttention.mix``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gsm.layers.attended import ENTRIES, SharedState, StatePart
from gsm.layers.block import LayerOutput
from gsm.layers.costs import AttentionCost, LayerCost, attention
from gsm.layers.latent_attention import LatentAttention
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles, Rope
from gsm.shapes import last_rows
from gsm.span import Span


class StateAttention(LatentAttention):
    """The attention of a decoder layer: a new query on the last M entries of the shared state, without a cache.

    Args:
        shape: widths that all attention layers share.
        state_size: number of entries that a row sees, including its own (M).
        slots: number of adjacent entries that each position has in the state (J).
        rope: rotary embedding of the state's entries.
        name: prefix of the names of its taps, e.g. ``decoder/5``.
        part: name of the part of the state that it reads.
    """

    # Number of earlier positions of its input that a row needs: none, as the past is in the state.
    reach = 0
    # Number of entries, including its own, that a row sees of a window of the layer in addition to the state.
    own_size = 0
    # Number of parts of the state that ``mix`` reads for each visible entry.
    parts_per_entry = 1

    def __init__(self, shape: Shape, *, state_size: int, slots: int, rope: Rope, name: str, part: str = ENTRIES.name):
        super().__init__(shape.dim, shape, window=state_size, rope=rope, name=name)
        self.slots, self.part = slots, part

    def start(self, batch: int, kind: str) -> Any:
        """Return None, because this layer has no cache: the state writer stores the state."""
        return None

    def forward(self, x_BTD: Tensor, span: Span, cache: Any, below: SharedState) -> tuple[Tensor, LayerOutput]:
        """Attend to the state, ``below``, for the last R of T positions, and pass it on."""
        angles = self.rope.at(span, x_BTD.dtype).last_rows(span.rows)
        query_BRHC, _ = self.ask(last_rows(x_BTD, span.rows))
        mixed_BRHC = self.mix(query_BRHC, below, span.row_position_BR, angles)
        return self.project(mixed_BRHC), LayerOutput(cache, below)

    def mix(self, query_BRHC: Tensor, state: SharedState, position_BR: Tensor, angles: Angles) -> Tensor:
        """Return the output of all heads, [B, R, H, C]; ``state`` has all parts, the other arguments are those of
        ``attend``."""
        return self.attend(query_BRHC, state.parts[self.part], position_BR, angles)

    def attend(
        self,
        query_BRHC: Tensor,
        state_BEC: Tensor,
        position_BR: Tensor,
        angles: Angles,
        entry_BFC: Tensor | None = None,
        chosen_BRK: Tensor | None = None,
        *,
        tap_name: str = "weights",
    ) -> Tensor:
        """Attend with one softmax over the last M entries and the sink.

        In the kernel, the range of entries advances by one per row. So for J entries per position, each query is
        repeated J times. The last copy sees all J entries of its position; its output is used:

            entries                a0 b0 | a1 b1 | a2 b2          J = 2, M = 4
            copies at position 2      '-----------'                sees b0 .. a2: ignored
                                         '-----------'             sees a1 .. b2: used

        Args:
            query_BRHC: queries before rotation.
            state_BEC: stored and new entries in the order of their tokens.
            position_BR: int64, positions of the rows.
            angles: rotation of the rows.
            entry_BFC, chosen_BRK: other entries in the same softmax, and the slots that each row sees; None: none.
            tap_name: name of the weights' tap; needed if ``mix`` attends more than once, e.g. ``weights/second``.

        Returns:
            The output of all heads, [B, R, H, C].
        """
        count = self.slots
        if count > 1:
            repeated = (query_BRHC, *angles) if chosen_BRK is None else (query_BRHC, *angles, chosen_BRK)
            query_BRHC, cos_BRP, sin_BRP, *rest = (x.repeat_interleave(count, dim=1) for x in repeated)
            angles, chosen_BRK = Angles(cos_BRP, sin_BRP), rest[0] if rest else None
            place_BRJ = position_BR[..., None] * count + torch.arange(count, device=position_BR.device)
            position_BR = place_BRJ.where(position_BR[..., None] >= 0, -1).flatten(1)
        band = (query_BRHC, state_BEC, position_BR, angles)
        return self.mix_entries(*band, entry_BFC, chosen_BRK, repeats=count, tap_name=tap_name)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of the products with all parameters, and of attention to the last M entries."""
        return LayerCost(self.cost_of_rows(), looks=(self.state_cost(),))

    def state_cost(self) -> AttentionCost:
        """Return the cost of attention to the last M entries of the state, J for each position."""
        inner, count = self.query.width, self.slots
        width = self.parts_per_entry * inner // self.query.heads
        return attention(inner, width, self.window_size // count, each=count, nearest=True)


class StateReader(ABC):
    """Base of all readers."""

    # Parts of the state that the writer must write.
    parts: tuple[StatePart, ...] = (ENTRIES,)

    @abstractmethod
    def layer(self, shape: Shape, *, layer: int, layers: int, **common: Any) -> StateAttention:
        """Build the attention of one decoder layer.

        Args:
            shape: widths that all attention layers share.
            layer, layers: number of this decoder layer, counted from 1, and the number of decoder layers.
            common: ``state_size``, ``slots``, ``rope`` and ``name`` of ``StateAttention``.
        """
