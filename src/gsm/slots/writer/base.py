"""How the encoder's output and the retrieved history become entries of the shared state: the config group
``model/writer`` (paper, section 3.2).

    e, increments --fuse--> z --norm, projection, norm, rotation--> state entry

The state reader decides which parts the state has (``StatePart``): one entry per position for the paper's reader, or
keys and values, or a state for each group of layers. A writer makes all parts from the same z.
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

    A subclass that writes one entry per position, from that position only, overrides only ``fuse``. Others also
    override

    - ``write``, if an entry depends on other positions or a position gets several entries;
    - ``start_part`` and ``stored``, if more than the last M entries are stored;
    - ``multiply_adds`` and ``reads``, if more is computed than products with the writer's matrices.

    Args:
        shape: widths that all attention layers share.
        state_size: number of entries of each part that a decoder row sees (M).
        rope: rotary embedding of the entries, equal to that of the decoder's queries.
        parts: the parts of the state that the reader needs.
        stages: number of aggregation stages, the length of ``increments``.
    """

    # Number of entries that this writer writes per position (J), adjacent in the state; it divides M.
    slots = 1
    # Number of earlier positions that this writer needs to make an entry.
    reach = 0
    # Whether this writer needs a model with stages.
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
        """Number of positions whose entries a decoder row sees, M / J."""
        return self.state_size // self.slots

    def start(self, batch: int) -> tuple[Any, ...]:
        """Return the empty cache of each part."""
        return tuple(self.start_part(batch) for _ in self.parts)

    def start_part(self, batch: int) -> Any:
        """Return the empty cache of one part: a window of M entries."""
        return self.window(batch, self.state_size)

    def window(self, batch: int, size: int) -> Window:
        """Return an empty window for the last ``size`` entries."""
        like = self.projection(self.parts[0]).projection.weight
        return Window.empty("shared_state", size, like.new_empty(batch, self.width))

    def stored(self, tokens: int) -> int:
        """Return the number of elements that one part stores for one sequence after ``tokens`` tokens."""
        return min(self.slots * tokens, self.state_size) * self.width

    def multiply_adds(self, first: int, last: int) -> dict[str, int]:
        """Return, by kind, the multiply-adds to write the entries of one part at positions [first, last).

        Products with this writer's matrices are left out, because the cost model counts them from the parameters.
        """
        return {}

    def reads(self, first: int, last: int) -> int:
        """Return the number of different elements that the products of ``multiply_adds`` read."""
        return 0

    @abstractmethod
    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Combine the encoder's output e and the stages' increments [B, T, D] into z, [B, T, D] (equation 11)."""

    def write(self, part: StatePart, x_BTD: Tensor, span: Span, cache: Any) -> tuple[Tensor, Any]:
        """Write the entries of one part (equation 12).

        Args:
            part: the part.
            x_BTD: z, normed.
            span: the positions. The last ``span.rows`` of them get entries; with a ``reach`` of 0, these are all.
            cache: the cache of this part.

        Returns:
            The stored and new entries, [B, E, C], in the order of their tokens, the J entries of a position adjacent;
            and the next cache.
        """
        return cache.extend(self.projection(part)(x_BTD, self.angles(part, span, x_BTD.dtype)))

    def projection(self, part: StatePart) -> Entry:
        """Return the projection that makes a part's entries from z."""
        return cast(Entry, self.entry[part.name])

    def angles(self, part: StatePart, span: Span, dtype: torch.dtype) -> Angles:
        """Return the rotation of the entries at these positions; the identity if the part is not rotated."""
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
            ``z_BTD``, the decoder's input; the state, with stored and new entries; the next cache of each part.
        """
        z_BTD = tap("state/z", self.fuse(encoded_BTD, increments))
        x_BTD, state, after = self.norm(z_BTD), {}, []
        for part, cache in zip(self.parts, caches, strict=True):
            state_BEC, cache = self.write(part, x_BTD, span, cache)
            state[part.name] = read_by_several(tap(f"state/{part.name}", state_BEC))
            after.append(cache)
        return z_BTD, SharedState(state), tuple(after)


def retrieved(increments: tuple[Tensor, ...]) -> Tensor:
    """Return r, the sum of the increments of at least one stage (equation 10)."""
    return sum(increments[1:], increments[0])
