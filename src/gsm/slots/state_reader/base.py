"""How decoder layers read the shared state: the slot ``model/state_reader`` (paper, section 3.3).

A reader says which parts it wants of the state (``parts``), and makes the attention of each decoder layer (``layer``).
To add one, write both: memory, cost, parameters and taps follow from them. An attention that reads otherwise than the
paper's overrides ``mix``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gsm.costs.primitives import AttentionCost, LayerCost, attention
from gsm.layers.attended import ENTRIES, SharedState, StatePart
from gsm.layers.block import LayerOutput
from gsm.layers.latent_attention import LatentAttention
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles, Rope
from gsm.shapes import last
from gsm.span import Span


class StateAttention(LatentAttention):
    """A decoder layer's attention: a new query on the last M entries of the shared state, and nothing to remember.

    Args:
        shape: shared widths.
        state_size: entries that a row sees (M), its own included.
        slots: entries of a position (J), side by side in the state.
        rope: rotation of the state's entries.
        name: what its taps are called, e.g. ``decoder/5``.
        part: the part of the state that it reads.
    """

    # How many positions back of its input a row needs: the state has what lies before.
    reach = 0
    # Entries of its own that a row sees besides those of the state, its own included.
    own_size = 0
    # Parts of the state that ``mix`` reads for each entry which a row sees.
    parts_per_entry = 1

    def __init__(self, shape: Shape, *, state_size: int, slots: int, rope: Rope, name: str, part: str = ENTRIES.name):
        super().__init__(shape.dim, shape, window=state_size, rope=rope, name=name)
        self.slots, self.part = slots, part

    def start(self, batch: int, kind: str) -> Any:
        """Nothing to remember: the state belongs to the writer."""
        return None

    def forward(self, x_BTD: Tensor, span: Span, cache: Any, below: SharedState) -> tuple[Tensor, LayerOutput]:
        """Reads the state, ``below``, for the last R of T positions, and hands it on."""
        angles = self.rope.at(span, x_BTD.dtype).last(span.rows)
        query_BRHC, _ = self.query(last(x_BTD, span.rows))
        mixed_BRHC = self.mix(query_BRHC, below, span.row_position_BR, angles)
        return self.output(mixed_BRHC), LayerOutput(cache, below)

    def mix(self, query_BRHC: Tensor, state: SharedState, position_BR: Tensor, angles: Angles) -> Tensor:
        """What the rows take from the state, [B, R, H, C]; arguments as of ``attend``."""
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
        """One softmax over the last M entries, with the sink in the denominator. [B, R, H, C].

        Attention moves its band on by one entry a row. Where a position has J entries, it gets J rows, equal but for
        where they stand; the last of them sees all J, and is the one that counts:

            entries     a0 b0 | a1 b1 | a2 b2          J = 2, M = 4
            rows of 2      '-----------'                sees b0 .. a2: dropped
                              '-----------'             sees a1 .. b2: counts

        Args:
            query_BRHC: not rotated.
            state_BEC: stored and new entries in stream order.
            position_BR: int64, positions of the rows.
            angles: rotation of the rows.
            entry_BFC, chosen_BRK: other entries in the same softmax, and which of them each row sees; None: none.
            tap_name: what the weights are called, where ``mix`` attends more than once: ``weights/second``.
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
        """What it costs: all parameters for each row, and the last M entries."""
        return LayerCost(self.cost_of_rows(), looks=(self.state_cost(),))

    def state_cost(self) -> AttentionCost:
        """What a row sees of the state: the last M entries, J of each position."""
        inner, count = self.query.width, self.slots
        width = self.parts_per_entry * inner // self.query.heads
        return attention(inner, width, self.window_size // count, each=count, nearest=True)


class StateReader(ABC):
    """Base of all readers."""

    # What is asked of the state writer.
    parts: tuple[StatePart, ...] = (ENTRIES,)

    @abstractmethod
    def layer(self, shape: Shape, *, layer: int, layers: int, **common: Any) -> StateAttention:
        """The attention of one decoder layer.

        Args:
            shape: shared widths.
            layer, layers: number of this decoder layer, from 1, and how many there are.
            common: ``state_size``, ``slots``, ``rope`` and ``name``, as of ``StateAttention``.
        """
