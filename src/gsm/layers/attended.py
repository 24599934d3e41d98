"""The entries that layers attend to and pass to the layers above: windows, banks and selections (the paper's W, B and
I, section 3.1), and the shared state that every decoder layer reads (section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from gsm.cache.slots import Slots
from gsm.layers.rope import Angles
from gsm.shapes import last_rows


@dataclass(frozen=True)
class Bank:
    """The bank that a Full layer builds: one entry for every m tokens, shared by the layers of its group.

    Attributes:
        entry_BFC: entries in F slots, each both key and value, rotated by the position of the first of its m tokens.
        key_BFI: index keys, with the same rotation (None: no layer searches this bank; a stage may use its own keys).
        first_BR, last_BR: int64, the slots [first, last) that each row may see.
        latent_BGC: the G new entries of this call before rotation, from which separate indexers make their keys.
        slots: the slots that the new entries are written to.
        angles: rotation of the new entries.
    """

    entry_BFC: Tensor
    key_BFI: Tensor | None
    first_BR: Tensor
    last_BR: Tensor
    latent_BGC: Tensor
    slots: Slots
    angles: Angles

    def last_rows(self, rows: int) -> Bank:
        """Return the bank for the last ``rows`` rows."""
        if rows == self.first_BR.shape[1]:
            return self
        return replace(self, first_BR=last_rows(self.first_BR, rows), last_BR=last_rows(self.last_BR, rows))


@dataclass(frozen=True)
class Attended:
    """The entries that the rows of one layer see.

    Attributes:
        window_BEC: window entries in the order of their tokens; the rows' own entries are the last ones.
        bank: the bank of the layer's group (None on a window-only layer).
        chosen_BRK: int64, selected bank slots, -1 for none (None on a window-only layer).
        bias_BRK: zeros added to the logits of selected slots, whose gradient trains the indexer (None: not used).
        pool_BRN: int64, candidate blocks that Reindex layers above may search (None: all).
    """

    window_BEC: Tensor
    bank: Bank | None = None
    chosen_BRK: Tensor | None = None
    bias_BRK: Tensor | None = None
    pool_BRN: Tensor | None = None

    def last_rows(self, rows: int) -> Attended:
        """Return the entries for the last ``rows`` rows."""
        if self.bank is None or rows == self.bank.first_BR.shape[1]:  # no tensor has rows, or all rows are wanted
            return self
        return replace(
            self,
            bank=self.bank.last_rows(rows),
            chosen_BRK=None if self.chosen_BRK is None else last_rows(self.chosen_BRK, rows),
            bias_BRK=None if self.bias_BRK is None else last_rows(self.bias_BRK, rows),
            pool_BRN=None if self.pool_BRN is None else last_rows(self.pool_BRN, rows),
        )


class StatePart(NamedTuple):
    """One tensor of the shared state that a state reader requires of the writer.

    Attributes:
        name: such as ``entries``, whose tap is ``state/entries``.
        rotated: whether each entry is rotated by its position, as keys are.
    """

    name: str
    rotated: bool = True


ENTRIES = StatePart("entries")  # the paper's state: one entry per position, key and value at once


@dataclass(frozen=True)
class SharedState:
    """The shared state that the first decoder layer gets.

    Attributes:
        parts: by name, [B, E, C]: stored and new entries in the order of their tokens, the entries of a position
            adjacent. The last entries are those of the rows.
    """

    parts: dict[str, Tensor]
