"""How retrieved history and the encoder's output become entries of the shared state: the slot ``model/writer``
(section 3.2).

e, increments --fuse--> z --norm, projection, norm, rotation--> state entry
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gsm.cache.store import FORGET, Window
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Entry, Shape
from gsm.layers.rope import Rope
from gsm.observe import tap
from gsm.span import Span


class StateWriter(nn.Module):
    """Base of all writers. A variant overrides ``fuse``, and no more than that if it writes one entry for a position,
    from that position alone.

    One that writes otherwise overrides ``write`` too; if it keeps more than the last M entries, ``start``, ``forget``
    and ``stored``; and if it computes more than products with its own matrices, ``multiply_adds`` and ``reads``.

    Args:
        shape: shared widths.
        state_size: entries that a decoder row sees (M).
        rope: rotation of the entries, that of the decoder's queries.
    """

    # Entries that this writer writes for a position (J), side by side in the state; M is a multiple of it.
    slots = 1
    # Positions before the first one that an entry is wanted for which this writer needs as well.
    reach = 0
    # Whether a model without stages has no use for this writer.
    needs_stages = False

    def __init__(self, shape: Shape, *, state_size: int, rope: Rope):
        super().__init__()
        self.state_size, self.rope = state_size, rope
        self.norm = RMSNorm(shape.dim)
        self.entry = Entry(shape)

    @property
    def positions(self) -> int:
        """Positions whose entries a decoder row sees, M / J."""
        return self.state_size // self.slots

    def start(self, batch: int) -> Any:
        """A state without entries."""
        return self.window(batch, self.state_size)

    def window(self, batch: int, size: int) -> Window:
        """No entries yet, of which the last ``size`` will be kept."""
        like = self.entry.projection.weight
        return Window.empty("shared_state", size, like.new_empty(batch, like.shape[0]))

    def forget(self) -> Any:
        """What stands in for the state in training, where nothing is kept."""
        return FORGET

    def stored(self, tokens: int) -> dict[str, int]:
        """Numbers that the state holds for one sequence after so many tokens, by kind of bytes."""
        width = self.entry.projection.out_features
        return {"shared_state": min(self.slots * tokens, self.state_size) * width}

    def multiply_adds(self, first: int, last: int) -> dict[str, int]:
        """What writing the entries of positions [first, last) takes, by part, besides the products with this writer's
        matrices: those are counted by themselves, each once for every position that comes in."""
        return {}

    def reads(self, first: int, last: int) -> int:
        """Numbers that these products look at, each once."""
        return 0

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """From the encoder's output and what each stage retrieved to ``z_BTD`` (equation 11)."""
        raise TypeError(f"{type(self).__name__} does not define fuse(encoded_BTD, increments)")

    def write(self, z_BTD: Tensor, span: Span, state: Any) -> tuple[Tensor, Any]:
        """Entries of the positions (equation 12).

        Args:
            z_BTD: what ``fuse`` made.
            span: the positions; entries are wanted for the last ``span.rows``, which are all unless there is a reach.
            state: the state before.

        Returns:
            ``state_BEC``, stored and new entries in stream order, the J of a position side by side; the state after.
        """
        return state.extend(self.entry(self.norm(z_BTD), self.rope.at(span, z_BTD.dtype)))

    def forward(
        self, encoded_BTD: Tensor, increments: tuple[Tensor, ...], span: Span, state: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Fuses and writes.

        Args:
            encoded_BTD: the encoder's output.
            increments: one [B, T, D] per stage.
            span: the positions, and for how many of them entries are wanted.
            state: the state before.

        Returns:
            ``z_BTD``, from which the decoder starts; ``state_BEC``, stored and new entries; the state after.
        """
        z_BTD = self.fuse(encoded_BTD, increments)
        state_BEC, state = self.write(z_BTD, span, state)
        tap("state/entries", state_BEC)
        return z_BTD, state_BEC, state


def retrieved(increments: tuple[Tensor, ...]) -> Tensor:
    """r, the sum of what the stages retrieved (equation 10); there must be a stage."""
    return sum(increments[1:], increments[0])
