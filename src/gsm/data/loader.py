"""Batches by index, for a trainer. Cutting a batch out of a mapped file is so cheap that no processes help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from torch import Tensor

Batch = dict[str, Tensor]


class Source(Protocol):
    """The source of batches: sequences by index, stored (`packing.Sequences`) or made (`synthetic.Generated`)."""

    def batch(self, indices: np.ndarray) -> Batch:
        """Return the sequences of these indices, int64 [B,T] each."""
        ...


class Batches:
    """A sized iterable of batches.

    It is not a `DataLoader`, so a trainer leaves its order alone. The order already depends on the rank.

    Args:
        sequences: the source of the batches.
        plan: called at every pass; returns the indices of each batch, from the place of the training on.
        length: number of batches of a pass.
        pin_memory: put batches into memory from which a GPU copies without waiting.
    """

    def __init__(
        self, sequences: Source, plan: Callable[[], Iterator[np.ndarray]], length: int, *, pin_memory: bool = False
    ) -> None:
        self.sequences, self.plan, self.length, self.pin_memory = sequences, plan, length, pin_memory

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        for indices in self.plan():
            batch = self.sequences.batch(indices)
            yield {name: value.pin_memory() for name, value in batch.items()} if self.pin_memory else batch

    def state_dict(self) -> dict[str, int]:
        """Return nothing. A trainer expects a loader with a state to continue from its place.

        This loader does: `plan` reads the training progress, which the checkpoint holds. A second count could only
        disagree with it.
        """
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore nothing."""
