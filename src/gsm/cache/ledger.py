"""The host's record of a memory: its layout, its capacity and its number of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """Counts and layout of a memory on the host, so that no call walks the tree of stores or waits for the device.

    Attributes:
        layout: kind, size, width and dtype of every store (see ``Memory.layout``), compared with the model's layout.
        capacity: tokens that a static memory holds (None: it grows).
        used: tokens read so far, including padding in the input.
        single_document: True if no call passed ``documents``, so that all tokens are one document, without padding.
        first_row: index of the first token, counted from the first token read, for which a row may be requested.
            Prerequisites of earlier rows may be missing (``rows`` below 1 of ``LanguageModel.forward``).
    """

    layout: tuple[tuple, ...] = ()
    capacity: int | None = None
    used: int = 0
    single_document: bool = True
    first_row: int = 0

    def require(self, tokens: int) -> None:
        """Raise ValueError if a static memory has no room for ``tokens`` more tokens."""
        if self.capacity is not None and self.used + tokens > self.capacity:
            raise ValueError(
                f"capacity must be at least {self.used + tokens} for {tokens} more tokens after {self.used}, got "
                f"{self.capacity}; start() without a capacity makes a memory that grows"
            )

    def require_rows(self, tokens: int, rows: int) -> None:
        """Raise ValueError for rows before ``first_row``, in a call with ``tokens`` tokens."""
        first = self.used + tokens - rows
        if first < self.first_row:
            raise ValueError(
                f"rows must begin at token {self.first_row} or later, as an earlier call with rows below 1 pruned the "
                f"tokens before it, got {rows}, from token {first} on"
            )

    def claim(self, tokens: int, single_document: bool = True, rows: int = 1) -> None:
        """Count ``tokens`` tokens as read. Raises ValueError, and counts nothing, if there is no room for them.

        Args:
            tokens: number of tokens of the call.
            single_document: whether the call had no ``documents``.
            rows: requested rows of the call.
        """
        self.require(tokens)
        used = self.used + tokens
        first_row = max(self.first_row, used - rows)
        # After the last function call, so that an interruption leaves either all counts updated or none.
        self.used, self.first_row, self.single_document = used, first_row, self.single_document and single_document

    def follow(self, other: Ledger) -> None:
        """Copy the counts of another ledger."""
        self.used, self.single_document, self.first_row = other.used, other.single_document, other.first_row
