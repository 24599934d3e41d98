"""Several entries for a position, against the bottleneck that the paper names (section 2.3): one write of fixed width
has to hold all that a position has found.

    position        0       1       2       3              J = 2, M = 4
    state        a0 b0 | a1 b1 | a2 b2 | a3 b3
    a row at 3                  '-------------'            sees M entries, so M / J positions
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from gsm.cache.store import WindowStore
from gsm.layers.attended import StatePart
from gsm.layers.projections import Entry, Shape
from gsm.slots.writer.additive import Additive
from gsm.span import Span


class MultiSlot(Additive):
    """z = e + r, and J entries RoPE_t( RMSNorm_j( W_j RMSNorm(z_t) ) ), j = 0 .. J - 1; entry 0 is the paper's.
    The decoder starts from z, as ever; only what it reads is more.

    All are made from z, not some from e or r alone: the sum loses little, being as wide as the model, but an entry has
    D / C times fewer channels (16 at size 1p5b). That is the narrow place, and J projections widen it J times. The
    state's size stays M, so that J trades how far a row sees for how much it sees of each position.

    Args:
        shape, state_size, common: as for every writer.
        slots: entries of a position (J); must divide the state's size.

    Raises:
        ValueError: if it does not.
    """

    def __init__(self, shape: Shape, *, state_size: int, slots: int, **common: Any):
        super().__init__(shape, state_size=state_size, **common)
        if slots < 1 or state_size % slots:
            raise ValueError(
                f"state_size {state_size} must be a multiple of the {slots} slots of a position; "
                "change model.state_size or model.writer.slots"
            )
        self.slots = slots
        further = {part.name: nn.ModuleList(Entry(shape) for _ in range(slots - 1)) for part in self.parts}
        self.further = nn.ModuleDict(further)

    def write(self, part: StatePart, x_BTD: Tensor, span: Span, cache: WindowStore) -> tuple[Tensor, WindowStore]:
        """All entries of all positions; those of one position share its rotation."""
        angles = self.angles(part, span, x_BTD.dtype)
        made = [
            entry(x_BTD, angles) for entry in (self.projection(part), *cast(nn.ModuleList, self.further[part.name]))
        ]
        return cache.extend(torch.stack(made, dim=2).flatten(1, 2))
