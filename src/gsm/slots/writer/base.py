"""How retrieved history and the encoder's output become entries of the shared state: the slot ``model/writer``
(section 3.2).

e, increments --fuse--> z --norm, projection, norm, rotation--> state entry

The slot ``model/state_reader`` decides which entries exist: one per position for the paper's reader, keys and values,
or a state for each group of layers (``StatePart``). A writer makes all of them from the same z.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gsm.cache.store import Window
from gsm.layers.attended import ENTRIES, SharedState, StatePart
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Entry, Shape
from gsm.layers.rope import Angles, Rope
from gsm.observe import tap
from gsm.shapes import read_by_several
from gsm.span import Span


class StateWriter(nn.Module, ABC):
    """Base of all writers.

    A variant that writes one entry per position, from that position only, overrides ``fuse`` and nothing else. Any
    other variant overrides ``write`` as well. If it stores more than the last M entries, it overrides ``start_part``
    and ``stored``. If it computes more than products with its own matrices, it overrides ``multiply_adds`` and
    ``reads``.

    Args:
        shape: shared widths.
        state_size: entries of each part that a decoder row sees (M).
        rope: rotation of the entries, equal to that of the decoder's queries.
        parts: parts of the state that the reader needs.
        stages: number of aggregation stages, the length of ``increments``.
    """

    # Number of entries that this writer writes per position (J), adjacent in the state; it divides M.
    slots = 1
    # Number of positions that this writer needs before the first position with an entry.
    reach = 0
    # Whether this writer is useless in a model without stages.
    needs_stages = False

    def __init__(
        self,
        shape: Shape,
        *,
        state_size: int,
        rope: Rope,
        parts: Sequence[StatePart] = (ENTRIES,),
        stages: int | None = None,  # None: the constructor of the subclass does not take it
    ):
        super().__init__()
        self.stages = stages
        self.state_size, self.rope, self.parts, self.width = state_size, rope, tuple(parts), shape.entry_dim
        self.norm = RMSNorm(shape.dim)
        self.entry = nn.ModuleDict({part.name: Entry(shape) for part in self.parts})

    @property
    def positions(self) -> int:
        """Number of positions with entries that a decoder row sees, M / J."""
        return self.state_size // self.slots

    def start(self, batch: int) -> tuple[Any, ...]:
        """Return an empty state, part by part."""
        return tuple(self.start_part(batch) for _ in self.parts)

    def start_part(self, batch: int) -> Any:
        """Return the empty cache of one part: a window of M entries."""
        return self.window(batch, self.state_size)

    def window(self, batch: int, size: int) -> Window:
        """Return an empty window for the last ``size`` entries."""
        like = self.projection(self.parts[0]).projection.weight
        return Window.empty("shared_state", size, like.new_empty(batch, self.width))

    def stored(self, tokens: int) -> int:
        """Return the number of elements that one part holds for one sequence after ``tokens`` tokens."""
        return min(self.slots * tokens, self.state_size) * self.width

    def multiply_adds(self, first: int, last: int) -> dict[str, int]:
        """Return the multiply-adds of writing one part's entries of positions [first, last), by kind.

        Products with this writer's matrices are not included: the cost model counts each once per input position.
        """
        return {}

    def reads(self, first: int, last: int) -> int:
        """Return the number of elements that these products read, each counted once."""
        return 0

    @abstractmethod
    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Combine the encoder's output and the stages' increments into ``z_BTD`` (equation 11)."""

    def write(self, part: StatePart, x_BTD: Tensor, span: Span, cache: Any) -> tuple[Tensor, Any]:
        """Write the entries of one part (equation 12).

        Args:
            part: the part.
            x_BTD: z, normed.
            span: the positions; the last ``span.rows`` of them get entries, which are all for a ``reach`` of 0.
            cache: the cache of this part.

        Returns:
            ``state_BEC``, stored and new entries in stream order, the J entries of a position adjacent; the next cache.
        """
        return cache.extend(self.projection(part)(x_BTD, self.angles(part, span, x_BTD.dtype)))

    def projection(self, part: StatePart) -> Entry:
        """Return the projection that makes a part's entries from z."""
        return cast(Entry, self.entry[part.name])

    def angles(self, part: StatePart, span: Span, dtype: torch.dtype) -> Angles:
        """Return the rotation of a part's entries at these positions; the identity for a part without rotation."""
        angles = self.rope.at(span, dtype)
        return angles if part.rotated else Angles(torch.ones_like(angles.cos_BTP), torch.zeros_like(angles.sin_BTP))

    def forward(
        self, encoded_BTD: Tensor, increments: tuple[Tensor, ...], span: Span, caches: Sequence[Any]
    ) -> tuple[Tensor, SharedState, tuple[Any, ...]]:
        """Compute z and write the state.

        Args:
            encoded_BTD: the encoder's output.
            increments: one [B, T, D] per stage.
            span: the positions; the last ``span.rows`` of them get entries.
            caches: the cache of each part.

        Returns:
            ``z_BTD``, the input of the decoder; the state, stored and new entries; the next caches.
        """
        z_BTD = tap("state/z", self.fuse(encoded_BTD, increments))
        x_BTD, state, after = self.norm(z_BTD), {}, []
        for part, cache in zip(self.parts, caches, strict=True):
            state_BEC, cache = self.write(part, x_BTD, span, cache)
            state[part.name] = read_by_several(tap(f"state/{part.name}", state_BEC))
            after.append(cache)
        return z_BTD, SharedState(state), tuple(after)


def retrieved(increments: tuple[Tensor, ...]) -> Tensor:
    """Return r, the sum of the stages' increments (equation 10); there must be at least one stage."""
    return sum(increments[1:], increments[0])
