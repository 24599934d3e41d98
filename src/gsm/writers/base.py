"""How retrieved history and the encoder's output become entries of the shared state: the slot ``model/writer``
(section 3.2).

e, increments --fuse--> z --norm, projection, norm, rotation--> state entry
"""

from __future__ import annotations

from torch import Tensor, nn

from gsm.memory.store import Window, WindowStore
from gsm.nn.attention import Entry, Shape
from gsm.nn.norm import RMSNorm
from gsm.nn.rope import Rope
from gsm.observe import tap
from gsm.span import Span


class StateWriter(nn.Module):
    """Base of all writers: a variant overrides ``fuse``.

    Args:
        shape: shared widths.
        state_size: entries that a decoder row sees (M).
        rope: rotation of the entries, that of the decoder's queries.
    """

    # Positions beyond the last M that this writer needs to write an entry.
    reach = 0

    def __init__(self, shape: Shape, *, state_size: int, rope: Rope):
        super().__init__()
        self.state_size, self.rope = state_size, rope
        self.norm = RMSNorm(shape.dim)
        self.entry = Entry(shape)

    def start(self, batch: int) -> Window:
        """A state without entries."""
        like = self.entry.projection.weight
        return Window.empty("shared_state", self.state_size, like.new_empty(batch, like.shape[0]))

    def fuse(self, encoded_BRD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """From the encoder's output and what each stage retrieved to ``z_BRD`` (equation 11)."""
        raise TypeError(f"{type(self).__name__} does not define fuse(encoded_BRD, increments)")

    def forward(
        self, encoded_BRD: Tensor, increments: tuple[Tensor, ...], span: Span, state: WindowStore
    ) -> tuple[Tensor, Tensor, WindowStore]:
        """Writes one entry per row (equation 12).

        Args:
            encoded_BRD: the encoder's output.
            increments: one [B, R, D] per stage.
            span: the rows.
            state: the state before.

        Returns:
            ``z_BRD``, from which the decoder starts; ``state_BEC``, stored and new entries; the state after.
        """
        z_BRD = self.fuse(encoded_BRD, increments)
        entry_BRC = self.entry(self.norm(z_BRD), self.rope(span.position_BT, z_BRD.dtype))
        state_BEC, state = state.extend(entry_BRC)
        tap("state/entries", state_BEC)
        return z_BRD, state_BEC, state
