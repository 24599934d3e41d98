"""What is known of a memory on the host: what it is made for, and how much of it is taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """The host's knowledge of a memory. With it no call has to walk the tree of stores, or to wait for the device.

    Attributes:
        layout: kind, size, width and dtype of every store (see ``Memory.layout``); a model knows its own.
        capacity: tokens that a static memory holds (None: it grows).
        used: tokens read so far, padding that was given included.
        single_document: no call has named documents, so that all which was read is one, without padding.
    """

    layout: tuple[tuple, ...] = ()
    capacity: int | None = None
    used: int = 0
    single_document: bool = True

    def require(self, tokens: int) -> None:
        """Raises ValueError if a static memory has no room for so many tokens more."""
        if self.capacity is not None and self.used + tokens > self.capacity:
            raise ValueError(
                f"memory is full: its capacity is {self.capacity} tokens, {self.used} are used, and {tokens} more were "
                f"given; use start(capacity={self.used + tokens}) or more, or start() for a memory that grows"
            )

    def claim(self, tokens: int, single_document: bool = True) -> None:
        """Counts so many tokens as read; ``single_document``: without documents of their own. Raises ValueError if
        there is no room for them, and counts nothing."""
        self.require(tokens)
        self.used += tokens
        self.single_document = self.single_document and single_document

    def follow(self, other: Ledger) -> None:
        """Takes over what another one has counted."""
        self.used, self.single_document = other.used, other.single_document
