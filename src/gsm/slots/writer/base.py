"""How retrieved history and the encoder's output become entries of the shared state: the slot ``model/writer``
(section 3.2).

e, increments --fuse--> z --norm, projection, norm, rotation--> state entry

Which entries there are says the slot ``model/state_reader``: the paper's reader wants one for a position, others want
keys and values, or a state for each group of layers (``StatePart``). A writer makes all of them from the same z.
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
from gsm.span import Span


class StateWriter(nn.Module, ABC):
    """Base of all writers. A variant overrides ``fuse``, and no more than that if it writes one entry for a position,
    from that position alone.

    One that writes otherwise overrides ``write`` too; if it keeps more than the last M entries, ``start_part`` and
    ``stored``; and if it computes more than products with its own matrices, ``multiply_adds`` and ``reads``.

    Args:
        shape: shared widths.
        state_size: entries of each part that a decoder row sees (M).
        rope: rotation of the entries, that of the decoder's queries.
        parts: what the state reader asks for.
        stages: how many aggregation stages there are, which is the length of ``increments``.
    """

    # Entries that this writer writes for a position (J), side by side in the state; M is a multiple of it.
    slots = 1
    # Positions before the first one that an entry is wanted for which this writer needs as well.
    reach = 0
    # Whether a model without stages has no use for this writer.
    needs_stages = False

    def __init__(
        self,
        shape: Shape,
        *,
        state_size: int,
        rope: Rope,
        parts: Sequence[StatePart] = (ENTRIES,),
        stages: int | None = None,  # None: a constructor of a subclass does not take it
    ):
        super().__init__()
        self.stages = stages
        self.state_size, self.rope, self.parts, self.width = state_size, rope, tuple(parts), shape.entry_dim
        self.norm = RMSNorm(shape.dim)
        self.entry = nn.ModuleDict({part.name: Entry(shape) for part in self.parts})

    @property
    def positions(self) -> int:
        """Positions whose entries a decoder row sees, M / J."""
        return self.state_size // self.slots

    def start(self, batch: int) -> tuple[Any, ...]:
        """A state without entries, part by part."""
        return tuple(self.start_part(batch) for _ in self.parts)

    def start_part(self, batch: int) -> Any:
        """What is remembered of one part: its last M entries, none yet."""
        return self.window(batch, self.state_size)

    def window(self, batch: int, size: int) -> Window:
        """No entries yet, of which the last ``size`` will be kept."""
        like = self.projection(self.parts[0]).projection.weight
        return Window.empty("shared_state", size, like.new_empty(batch, self.width))

    def stored(self, tokens: int) -> int:
        """Numbers that one part holds for one sequence after so many tokens."""
        return min(self.slots * tokens, self.state_size) * self.width

    def multiply_adds(self, first: int, last: int) -> dict[str, int]:
        """What writing one part's entries of positions [first, last) takes, by kind, besides the products with this
        writer's matrices: those are counted by themselves, each once for every position that comes in."""
        return {}

    def reads(self, first: int, last: int) -> int:
        """Numbers that these products look at, each once."""
        return 0

    @abstractmethod
    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """From the encoder's output and what each stage retrieved to ``z_BTD`` (equation 11)."""

    def write(self, part: StatePart, x_BTD: Tensor, span: Span, cache: Any) -> tuple[Tensor, Any]:
        """Entries of one part (equation 12).

        Args:
            part: which.
            x_BTD: z, normed.
            span: the positions; entries are wanted for the last ``span.rows``, which are all unless there is a reach.
            cache: what is remembered of this part.

        Returns:
            ``state_BEC``, stored and new entries in stream order, the J of a position side by side; the cache after.
        """
        return cache.extend(self.projection(part)(x_BTD, self.angles(part, span, x_BTD.dtype)))

    def projection(self, part: StatePart) -> Entry:
        """What makes a part's entries of z."""
        return cast(Entry, self.entry[part.name])

    def angles(self, part: StatePart, span: Span, dtype: torch.dtype) -> Angles:
        """The rotation of a part's entries at these positions; by nothing where it has none."""
        angles = self.rope.at(span, dtype)
        return angles if part.rotated else Angles(torch.ones_like(angles.cos_BTP), torch.zeros_like(angles.sin_BTP))

    def forward(
        self, encoded_BTD: Tensor, increments: tuple[Tensor, ...], span: Span, caches: Sequence[Any]
    ) -> tuple[Tensor, SharedState, tuple[Any, ...]]:
        """Fuses and writes.

        Args:
            encoded_BTD: the encoder's output.
            increments: one [B, T, D] per stage.
            span: the positions, and for how many of them entries are wanted.
            caches: what is remembered of each part.

        Returns:
            ``z_BTD``, from which the decoder starts; the state, stored and new entries; the caches after.
        """
        z_BTD = tap("state/z", self.fuse(encoded_BTD, increments))
        x_BTD, state, after = self.norm(z_BTD), {}, []
        for part, cache in zip(self.parts, caches, strict=True):
            state_BEC, cache = self.write(part, x_BTD, span, cache)
            state[part.name] = tap(f"state/{part.name}", state_BEC)
            after.append(cache)
        return z_BTD, SharedState(state), tuple(after)


def retrieved(increments: tuple[Tensor, ...]) -> Tensor:
    """r, the sum of what the stages retrieved (equation 10); there must be a stage."""
    return sum(increments[1:], increments[0])
