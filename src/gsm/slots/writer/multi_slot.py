"""A writer of several entries per position. The paper (section 2.3) names the problem that this addresses: one entry of
fixed width must hold everything that was retrieved for a position.

    position        0       1       2       3              J = 2, M = 4
    state        a0 b0 | a1 b1 | a2 b2 | a3 b3
    a row at 3                  '-------------'            sees M entries, so M / J positions
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from gsm.cache.store import WindowStore
from gsm.errors import within
from gsm.layers.attended import StatePart
from gsm.layers.projections import Entry, Shape
from gsm.slots.writer.additive import Additive
from gsm.span import Span


class MultiSlot(Additive):
    """z = e + r, and J entries RoPE_t( RMSNorm_j( W_j RMSNorm(z_t) ) ), j = 0 .. J - 1; entry 0 is the paper's.

    An entry has D / C times fewer channels than z (16 at size 1p5b), and J projections of z keep J times more of them.
    The state still has M entries, so with a larger J a row sees fewer positions in more detail. The decoder starts from
    z, as with the other writers.

    Args:
        shape, state_size, common: as in ``StateWriter``.
        slots: entries per position (J); a divisor of ``state_size``.

    Raises:
        ValueError: if ``slots`` does not divide ``state_size``.
    """

    def __init__(self, shape: Shape, *, state_size: int, slots: int, **common: Any):
        super().__init__(shape, state_size=state_size, **common)
        within(1, 1024, slots=slots)
        if state_size % slots:
            raise ValueError(f"model.writer.slots must divide state_size ({state_size}), got {slots}")
        self.slots = slots
        further = {part.name: nn.ModuleList(Entry(shape) for _ in range(slots - 1)) for part in self.parts}
        self.further = nn.ModuleDict(further)

    def write(self, part: StatePart, x_BTD: Tensor, span: Span, cache: WindowStore) -> tuple[Tensor, WindowStore]:
        """Write J entries for each position, all rotated by this position."""
        angles = self.angles(part, span, x_BTD.dtype)
        projections = (self.projection(part), *cast(nn.ModuleList, self.further[part.name]))
        entries = [projection(x_BTD, angles) for projection in projections]
        return cache.extend(torch.stack(entries, dim=2).flatten(1, 2))
