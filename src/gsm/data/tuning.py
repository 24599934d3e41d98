"""A part of the training text for tuning, so that no choice is made on the reported split.

    training split   aaaaaaaa bbbbbb TTTTT cccccccc dddd TTTTT eeeeee        T: held out, ranges all over the split

The ids and the tokenizer are those of the training split, in its cached file. Only the cuts between sequences differ. A
range begins and ends at a nearby border of documents, if there is one. A document longer than a range may have ids in
both parts, but each id is in one part only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gsm.data.tokenizer import Tokenizer
from gsm.data.tokens import Split

SHARE = 0.05  # of the training split
RANGES = 20  # at most
LEAST = 4096  # ids in a range, unless the part has fewer


class Ranges:
    """Ranges of ids as one row.

    Args:
        ids: all ids.
        ranges: pairs of begin and end, ascending; none is empty.
    """

    def __init__(self, ids: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        self._ids, self._ranges = ids, ranges
        self._ends = np.cumsum([stop - start for start, stop in ranges])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the ids of a slice without a stride; a copy only where it crosses a border of ranges."""
        start, stop, _ = places.indices(len(self))
        parts: list[np.ndarray] = []
        for number in range(int(np.searchsorted(self._ends, start, side="right")), len(self._ranges)):
            first, last = self._ranges[number]
            moved = last - int(self._ends[number])  # from places here to places there
            parts.append(self._ids[max(first, start + moved) : max(first, min(last, stop + moved))])
            if stop <= self._ends[number]:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self._ids[0:0]])


@dataclass(frozen=True, kw_only=True)
class Part(Split):
    """A split that consists of ranges of another split's ids.

    Attributes:
        whole: the other split.
        ranges: of its ids, ascending.
    """

    whole: Split
    ranges: tuple[tuple[int, int], ...]

    def open(self) -> Ranges:  # pyright: ignore[reportIncompatibleMethodOverride] # it has all that sequences use
        """Return the ids, mapped from the file and not read."""
        return Ranges(self.whole.open(), self.ranges)


def divide(whole: Split, tokenizer: Tokenizer, most: int | None = None) -> dict[str, Part]:
    """Divide the training split into a part to train on ("train") and a part to tune on ("validation").

    Args:
        whole: the training split.
        tokenizer: the one that has encoded it.
        most: about the largest number of ids to hold out; None: a twentieth.

    Raises:
        ValueError: the split is too short to be divided.
    """
    held_out_tokens = int(SHARE * whole.tokens) if most is None else min(most, int(SHARE * whole.tokens))
    if held_out_tokens < 1:
        raise ValueError(f"held_out=tuning needs more text, got a training split of {whole.tokens} tokens")
    ids, count = whole.open(), min(RANGES, max(1, held_out_tokens // LEAST))
    size = held_out_tokens // count

    def near(place: int) -> int:
        """Return the next begin of a document from a place on, or the place if none lies within a range's length."""
        ended = np.flatnonzero(ids[place - 1 : place - 1 + size] == tokenizer.end_of_text)
        return place + int(ended[0]) if len(ended) else place

    begins = [(2 * number + 1) * whole.tokens // (2 * count) for number in range(count)]
    held_out = tuple((near(begin), near(begin + size)) for begin in begins)
    borders = [0, *(place for pair in held_out for place in pair), whole.tokens]
    rest = tuple(zip(borders[::2], borders[1::2], strict=True))
    spelled = sum(int(tokenizer.token_lengths_V[ids[start:stop]].sum()) for start, stop in held_out)
    share = spelled / max(1, whole.spelled)
    text, lost = round(share * whole.bytes), round(share * whole.lost)  # an exact tokenizer spells every byte
    tokens = sum(stop - start for start, stop in held_out)
    facts = {"path": whole.path, "dtype": whole.dtype, "whole": whole}
    sizes = {"tokens": tokens, "bytes": text, "spelled": spelled, "lost": lost}
    others = {name: getattr(whole, name) - size for name, size in sizes.items()}
    return {
        "train": Part(name="train", ranges=rest, **others, **facts),
        "validation": Part(name="tuning", ranges=held_out, **sizes, **facts),
    }
