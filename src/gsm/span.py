"""Which positions are new in a call, where they stand in their documents, and for how many of them an output is wanted.

Everything that depends on documents follows from document-local positions: documents are contiguous runs, so a
position p has exactly p predecessors in its document, a window of W reaches min(p, W - 1) entries back, and (p + 1)
// m groups of m tokens are finished. No layer ever compares document ids.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gsm.shapes import last

Made = TypeVar("Made")


@dataclass(frozen=True)
class Span:
    """The new positions of a call, as one layer sees them.

    Attributes:
        position_BT: int64, position of each new token inside its document, from 0; -1 marks padding.
        rows: how many trailing positions this layer has to produce; of a whole call, 0 or less: none, and the first one
            that will be wanted comes 1 - rows positions later.
        single_document: known without asking the device, because no call has named documents: these positions end the
            one document that is all which the stores hold.
        filled: the same of a static memory, whose stores may also have places that are not filled yet: how many tokens
            there are, these included (None: not known).
        pieces: into how many pieces, of equal lengths, the sequences of this call were cut, of which these are some.
        tokens: of each whole sequence that was cut, without what makes its pieces equally long (None: it was not cut).
        known: what has been computed from the positions (``once``); layers with the same positions share it.
    """

    position_BT: Tensor
    rows: int
    single_document: bool = False
    filled: int | None = None
    pieces: int = 1
    tokens: int | None = None
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def row_position_BR(self) -> Tensor:
        """Positions of the rows asked for."""
        return last(self.position_BT, self.rows)

    def last(self, rows: int) -> Span:
        """Ask for ``rows`` trailing positions (or all there are; less than none is none)."""
        rows = max(0, min(rows, self.position_BT.shape[1]))
        return self if rows == self.rows else replace(self, rows=rows)

    def cut(self) -> Span:
        """The rows of this layer are the new positions of the next one. Fewer of them end no whole document, and share
        nothing that was computed from all."""
        if self.rows == self.position_BT.shape[1]:
            return self
        return Span(self.row_position_BR, self.rows, pieces=self.pieces, tokens=self.tokens)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` returns, made for the first layer that asks for this key. It must follow from the positions,
        and from what is alike for all who ask with this key: banks of one ratio have filled alike."""
        if torch.compiler.is_compiling():  # a recomputed block may change nothing outside; a compiler shares by itself
            return make()
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]


def document_positions(documents_BT: Tensor, last_document_B: Tensor, last_position_B: Tensor) -> Tensor:
    """Positions inside documents, given as contiguous runs of equal ids; id -1 is padding and gets position -1.

    Args:
        documents_BT: int64 document ids of the new tokens.
        last_document_B: id of the last token before them (-1: none).
        last_position_B: its position inside its document (-1: none).

    Returns:
        position_BT, int64.
    """
    previous_BT = torch.cat([last_document_B[:, None], documents_BT[:, :-1]], dim=1)
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    start_BT = torch.where(documents_BT != previous_BT, index_T, -1).cummax(dim=1).values
    position_BT = torch.where(start_BT >= 0, index_T - start_BT, last_position_B[:, None] + 1 + index_T)
    return torch.where(documents_BT < 0, -1, position_BT)


def following_positions(last_position_B: Tensor, length: int) -> Tensor:
    """The same where the document of the last token goes on: int64 [B, T], counted on from its position."""
    return last_position_B[:, None] + torch.arange(1, length + 1, device=last_position_B.device)
