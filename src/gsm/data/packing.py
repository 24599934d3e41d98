"""Token ids cut into sequences of equal length, and the order in which training takes them. B batch, T positions.

    ids        a0 a1 a2 END b0 b1 b2 b3 b4 END c0 ...          one row of all documents
    sequence 0 a0 a1 a2 END | b0 b1 b2 b3 | b4 END c0 ...      T = 4; the next sequence's first id is the last target
    targets    a1 a2 END -100 b1 b2 b3 b4 | END -100 ...       the end of text is predicted, the id behind it is not

Ids that fill no whole sequence at the end of a split are left over. The treatment of documents is a choice:

    isolated                attention and positions stay inside documents; the first id of a document is no target
    isolated_all_targets    the same, and every id is a target: the first of a document is predicted from the end of the
                            one before it
    stream                  a sequence is one document: positions run through, and every id is a target
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gsm.data.tokens import Split
from gsm.models.checks import IGNORED

DOCUMENTS = ("isolated", "isolated_all_targets", "stream")
BLANK = -1  # the index of a sequence without targets, which evens out ranks


class Sequences:
    """Sequence i holds ids i*T .. i*T + T - 1 of a split, its targets are the ids one further on.

    Args:
        split: the cached ids.
        context: T, at least 2.
        end_of_text: the id that closes a document.
        documents: ``isolated``, ``isolated_all_targets`` or ``stream``, see above.

    Raises:
        ValueError: the split is shorter than one sequence and its last target.
    """

    def __init__(self, split: Split, context: int, end_of_text: int, documents: str = "isolated") -> None:
        self.context, self.end_of_text, self.documents = context, end_of_text, documents
        self.ids = split.open()
        if len(self) == 0:
            or_say = ", or name files to hold out with data.validation=" if split.name == "validation" else ""
            raise ValueError(
                f"context must be below {len(self.ids)}, the tokens of the {split.name} split, got {context}; use a "
                f"shorter context, or more text{or_say}"
            )

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sequence: `tokens`, `targets` and `documents`, int64 [T] each.

        Raises:
            IndexError: there is no such sequence.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} does not exist; there are {len(self)}")
        return {name: value_BT[0] for name, value_BT in self.batch([index]).items()}

    def batch(self, indices: np.ndarray | list[int]) -> dict[str, Tensor]:
        """Return the sequences of these indices, int64 [B,T] each.

        `targets` is -100 where nothing is to be predicted: after an end of text where documents are `isolated`, and
        throughout at index -1 (`BLANK`). `documents` counts documents upwards along a row, from a number that no other
        sequence uses; in a `stream` there is one.
        """
        index_B = np.asarray(indices, dtype=np.int64)
        blank_B1 = (index_B < 0)[:, None]
        start_B1 = np.maximum(index_B, 0)[:, None] * self.context
        rows = np.stack([self.ids[start : start + self.context + 1] for start in start_B1[:, 0]]).astype(np.int64)
        token_BT, target_BT = np.ascontiguousarray(rows[:, :-1]), rows[:, 1:]
        end_BT = token_BT == self.end_of_text
        new_BT = end_BT & (self.documents != "stream")  # another document begins behind this id
        ignored_BT = end_BT & (self.documents == "isolated")
        values = {
            "tokens": token_BT,
            "targets": np.where(ignored_BT | blank_B1, IGNORED, target_BT),
            "documents": start_B1 + np.cumsum(new_BT, axis=1) - new_BT,
        }
        return {name: torch.from_numpy(value_BT) for name, value_BT in values.items()}

    def documents_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of the document that each of these sequences begins in, int64."""
        ends = np.flatnonzero(np.asarray(self.ids[: len(self.ids)]) == self.end_of_text)
        return np.searchsorted(ends, np.asarray(indices) * self.context)

    def each(self, indices: np.ndarray, at_once: int = 256) -> Iterator[dict[str, Tensor]]:
        """Yield the sequences of these indices one by one, as `__getitem__` returns them, cut in larger pieces."""
        for first in range(0, len(indices), at_once):
            batch = self.batch(indices[first : first + at_once])
            for rows in zip(*batch.values(), strict=True):
                yield dict(zip(batch, rows, strict=True))


class TrainingOrder:
    """The order of training: the number of the g-th sequence, with a new permutation for every pass over the data.

    A pure function of (seed, g): neither batch size, ranks, workers nor interruptions enter, so that runs which differ
    in these see the same text in the same order.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the sequences at places start <= g < stop, int64 [stop - start]."""
        places = np.arange(start, stop)
        passes, inside = places // self.count, places % self.count
        chosen = np.empty(len(places), dtype=np.int64)
        for number in np.unique(passes):
            of_pass = passes == number
            chosen[of_pass] = _permutation(self.count, self.seed, int(number))[inside[of_pass]]
        return chosen


def training_batches(
    order: TrainingOrder, *, start: int, batches: int, batch_size: int, rank: int, world: int
) -> Iterator[np.ndarray]:
    """Yield the indices [B] of each batch of one rank, after `start` sequences that all ranks together have taken."""
    for step in range(batches):
        first = start + (step * world + rank) * batch_size
        yield order.indices(first, first + batch_size)


def validation_batches(count: int, *, limit: int | None, batch_size: int, rank: int, world: int) -> list[np.ndarray]:
    """Return the indices [up to B] of each validation batch of one rank.

    Together the ranks take each of `validation_indices(count, limit)` once; `BLANK` evens out their numbers.
    """
    indices = validation_indices(count, limit)
    even = np.concatenate([indices, np.full(-len(indices) % world, BLANK)])[rank::world]
    return [even[first : first + batch_size] for first in range(0, len(even), batch_size)]


def validation_indices(count: int, limit: int | None) -> np.ndarray:
    """Return all of `count` sequences in order, or `limit` of them spread evenly: few still touch many documents."""
    taken = count if limit is None else min(limit, count)
    return np.arange(taken, dtype=np.int64) * count // taken


def indices_outside(sequences: Sequences, windows: Sequences, count: int) -> np.ndarray:
    """Return the ascending indices, int64, of the sequences that, with their targets, overlap none of ``count`` windows
    spread evenly over the same split."""
    first = np.arange(len(sequences), dtype=np.int64) * sequences.context
    begin = validation_indices(len(windows), count) * windows.context
    begun = np.searchsorted(begin, first + sequences.context, side="right")  # windows up to a sequence's last target
    return np.flatnonzero((begun == 0) | (begin[begun - 1] + windows.context < first))


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, number: int) -> np.ndarray:
    return np.random.default_rng([seed, number]).permutation(count)
