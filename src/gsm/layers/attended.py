"""What layers attend to, handed on to those above: windows, banks and selections (the paper's W, B and I, section 3.1),
and the shared state that every decoder layer reads (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from gsm.cache.slots import Slots
from gsm.layers.rope import Angles
from gsm.shapes import last


@dataclass(frozen=True)
class Bank:
    """The bank that a Full layer publishes.

    Attributes:
        entry_BFC: entries, rotated at the position of their group's first token; key and value at once.
        key_BFI: index keys, rotated likewise (None: no layer searches this bank; a stage may, with its own keys).
        first_BR, last_BR: int64, the slots [first, last) that each row may see.
        latent_BGC: entries that this call added, before rotation: what another indexer makes its keys from.
        slots: where those go.
        angles: rotation of what goes there.
    """

    entry_BFC: Tensor
    key_BFI: Tensor | None
    first_BR: Tensor
    last_BR: Tensor
    latent_BGC: Tensor
    slots: Slots
    angles: Angles

    def last(self, rows: int) -> Bank:
        """The same bank for the last ``rows`` rows."""
        if rows == self.first_BR.shape[1]:
            return self
        return replace(self, first_BR=last(self.first_BR, rows), last_BR=last(self.last_BR, rows))


@dataclass(frozen=True)
class Attended:
    """What the rows of one layer see.

    Attributes:
        window_BEC: window entries in stream order, the rows standing at the end.
        bank: the bank of the layer's group (None on a window-only layer).
        chosen_BRK: int64, selected bank slots, -1 for none (None on a window-only layer).
        bias_BRK: zeros on their logits, whose gradient teaches the indexer that has selected them (None: nothing does).
        pool_BRN: int64, candidate blocks that later Reindex layers may search (None: all).
    """

    window_BEC: Tensor
    bank: Bank | None = None
    chosen_BRK: Tensor | None = None
    bias_BRK: Tensor | None = None
    pool_BRN: Tensor | None = None

    def last(self, rows: int) -> Attended:
        """The same for the last ``rows`` rows."""
        if self.bank is None or rows == self.bank.first_BR.shape[1]:  # nothing of it is by rows, or these are all
            return self
        return replace(
            self,
            bank=self.bank.last(rows),
            chosen_BRK=None if self.chosen_BRK is None else last(self.chosen_BRK, rows),
            bias_BRK=None if self.bias_BRK is None else last(self.bias_BRK, rows),
            pool_BRN=None if self.pool_BRN is None else last(self.pool_BRN, rows),
        )

    def choose(self, chosen_BRK: Tensor | None, bias_BRK: Tensor | None = None) -> Attended:
        """The same with another selection, and what its logits are biased with."""
        return replace(self, chosen_BRK=chosen_BRK, bias_BRK=bias_BRK)


class StatePart(NamedTuple):
    """One tensor of the shared state: what a state reader asks of the writer.

    Attributes:
        name: ``entries``; its tap is ``state/entries``.
        rotated: whether each entry is rotated by its position, as keys are.
    """

    name: str
    rotated: bool = True


ENTRIES = StatePart("entries")  # the paper's state: one entry for a position, key and value at once


@dataclass(frozen=True)
class SharedState:
    """The state of a model as the rows of the first decoder layer find it.

    Attributes:
        parts: by name, [B, E, C]: stored and new entries in stream order, those of a position side by side; the new
            ones end with those of the rows.
    """

    parts: dict[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> SharedState:
        """The same with every part replaced."""
        return SharedState({name: function(entry_BEC) for name, entry_BEC in self.parts.items()})
