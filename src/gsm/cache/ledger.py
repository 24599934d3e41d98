"""What is known of a memory on the host: what it is made for, and how much of it is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Ledger:
    """The host's knowledge of a memory. With it no call has to walk the tree of stores, or to wait for the device.

    Attributes:
        layout: kind, size, width and dtype of every store (see ``Memory.layout``); a model knows its own.
        capacity: tokens that a static memory holds (None: it grows).
        used: tokens read so far, padding that was given included.
        single_document: no call has named documents, so that all which was read is one, without padding.
        first_row: of all tokens read so far and later, the first for which rows may be asked: what those before it
            would need has perhaps not been computed (``rows`` below 1 of ``LanguageModel.forward``).
        pieces: the ``gsm.cache.pieces.Pieces`` that this memory stands for, others being on other ranks (None: it
            stands for whole sequences).
    """

    layout: tuple[tuple, ...] = ()
    capacity: int | None = None
    used: int = 0
    single_document: bool = True
    first_row: int = 0
    pieces: Any = None

    def require(self, tokens: int) -> None:
        """Raises ValueError if a static memory has no room for so many tokens more."""
        if self.capacity is not None and self.used + tokens > self.capacity:
            raise ValueError(
                f"memory is full: its capacity is {self.capacity} tokens, {self.used} are used, and {tokens} more were "
                f"given; use start(capacity={self.used + tokens}) or more, or start() for a memory that grows"
            )

    def require_rows(self, tokens: int, rows: int) -> None:
        """Raises ValueError for rows of a call with so many tokens that an earlier call has said nobody will want."""
        first = self.used + tokens - rows
        if first < self.first_row:
            raise ValueError(
                f"rows is {rows}, which begins at token {first}, but an earlier call with rows below 1 said that none "
                f"is wanted before token {self.first_row}; ask for fewer"
            )

    def claim(self, tokens: int, single_document: bool = True, rows: int = 1) -> None:
        """Counts so many tokens as read; ``single_document``: without documents of their own; ``rows``: asked for.
        Raises ValueError if there is no room for them, and counts nothing."""
        self.require(tokens)
        self.used += tokens
        self.first_row = max(self.first_row, self.used - rows)
        self.single_document = self.single_document and single_document

    def follow(self, other: Ledger) -> None:
        """Takes over what another one has counted."""
        self.used, self.single_document, self.first_row = other.used, other.single_document, other.first_row
