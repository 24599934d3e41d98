"""The new positions of a call, their places in documents, and the number of requested rows.

Everything that depends on documents follows from document-local positions. Documents are contiguous runs, so a position
p has exactly p predecessors in its document, a window of W reaches min(p, W - 1) entries back, and (p + 1) // m groups
of m tokens are finished. No layer ever compares document ids.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gsm.shapes import last_rows

Made = TypeVar("Made")


@dataclass(frozen=True)
class Span:
    """The new positions of a call, as one layer sees them.

    Attributes:
        position_BT: int64, position of each new token inside its document, from 0; -1 marks padding.
        rows: number of trailing positions that this layer computes. For a whole call, zero or negative: none now; the
            first needed position is ``1 - rows`` tokens after this call.
        single_document: True if no call passed ``documents``, so the stores hold exactly one document, which ends with
            these positions. Known on the host, without synchronising with the device.
        filled: number of valid tokens in the stores of a static memory with a single document, including these; None
            if unknown.
        tokens: length of the whole sequences, if these positions are equal pieces of them, the last piece padded (None:
            the positions are whole sequences).
        computed: results of ``once``, shared by layers with the same positions.
    """

    position_BT: Tensor
    rows: int
    single_document: bool = False
    filled: int | None = None
    tokens: int | None = None
    computed: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def row_position_BR(self) -> Tensor:
        """Positions of the requested rows."""
        return last_rows(self.position_BT, self.rows)

    def last_rows(self, rows: int) -> Span:
        """Return this span with ``rows`` requested rows, limited to 0 .. T."""
        rows = max(0, min(rows, self.position_BT.shape[1]))
        return self if rows == self.rows else replace(self, rows=rows)

    def cut(self) -> Span:
        """Return the span of the next layer: its new positions are the rows of this layer.

        If this layer computes fewer rows than positions, the next span is not a whole document, and it shares no
        computed values.
        """
        if self.rows == self.position_BT.shape[1]:
            return self
        return Span(self.row_position_BR, self.rows, tokens=self.tokens)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of ``make``, computed once for all layers that use this key.

        ``make()`` may depend only on the positions and on ``key``. (All banks of one ratio are equally full.)
        """
        if torch.compiler.is_compiling():  # recomputed blocks must have no side effects, and a compiler removes repeats
            return make()
        if key not in self.computed:
            self.computed[key] = make()
        return self.computed[key]


def document_positions(
    documents_BT: Tensor, last_document_B: Tensor | None = None, last_position_B: Tensor | None = None
) -> Tensor:
    """Return positions inside documents, which are contiguous runs of equal ids; id -1 is padding, at position -1.

    Args:
        documents_BT: int64 document ids of the new tokens.
        last_document_B: document id of the last token before them (-1: none); None: no sequence has one.
        last_position_B: position of that token inside its document (-1: none); None: no sequence has one.

    Returns:
        position_BT, int64.
    """
    if last_document_B is None or last_position_B is None:
        last_document_B = last_position_B = torch.full_like(documents_BT[:, 0], -1)
    previous_BT = torch.cat([last_document_B[:, None], documents_BT[:, :-1]], dim=1)
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    start_BT = torch.where(documents_BT != previous_BT, index_T, -1).cummax(dim=1).values
    position_BT = torch.where(start_BT >= 0, index_T - start_BT, last_position_B[:, None] + 1 + index_T)
    return torch.where(documents_BT < 0, -1, position_BT)


def following_positions(last_position_B: Tensor, length: int) -> Tensor:
    """Return the positions after ``last_position_B`` in the same document: int64 [B, T]."""
    return last_position_B[:, None] + torch.arange(1, length + 1, device=last_position_B.device)
