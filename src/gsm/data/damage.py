"""Files that turn out to be damaged while they are read: they stop everything, or are left out and named.

What came before the damage in such a file is kept, so that the same files always give the same text, however often
reading was interrupted. Whether damage stops or is skipped is therefore no part of what the ids are known by.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from gsm.data.reading import Damaged, Piece

log = logging.getLogger(__name__)
CHOICES = ("stop", "skip")


class Damage:
    """What is done about damaged files, and which there were.

    Args:
        choice: ``stop`` or ``skip``.

    Attributes:
        skipped: by the name of a file, what is wrong with it.

    Raises:
        ValueError: for another choice.
    """

    def __init__(self, choice: str) -> None:
        if choice not in CHOICES:
            raise ValueError(f"on_corrupt {choice!r} is unknown; give data.on_corrupt one of {', '.join(CHOICES)}")
        self.choice = choice
        self.skipped: dict[str, str] = {}

    def sound(self, files: Iterable[tuple[str, Iterator[Piece]]]) -> Iterator[Piece]:
        """The pieces of these files one after another.

        Raises:
            Damaged: a file is damaged and the choice is to stop, or none of them is sound.
        """
        names, found = [], False
        for name, pieces in files:
            names.append(name)
            for piece in self._until_damage(name, pieces):
                found = True
                yield piece
        lost = [self.skipped[name] for name in names if name in self.skipped]
        if lost and not found:
            raise Damaged(f"on_corrupt is skip and nothing is left, of {len(names)} files none is sound: {lost[0]}")

    def told(self, names: Iterable[str]) -> tuple[str, ...]:
        """A sentence for each of these files that was skipped."""
        return tuple(self.skipped[name] for name in names if name in self.skipped)

    def _until_damage(self, name: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
        last = True
        try:
            for piece in pieces:
                last = piece.last
                yield piece
        except Damaged as error:
            if self.choice == "stop":
                raise Damaged(f"{error} (or leave such files out with data.on_corrupt=skip)") from error
            if name not in self.skipped:  # it may be read once for the tokenizer and once for the ids
                log.warning("Skipped: %s.", error)
            self.skipped[name] = str(error)
            if not last:  # or the next file would go on with this one's document
                yield Piece("", last=True)
