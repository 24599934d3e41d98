"""Batches by index: what `TextData` hands to a trainer.

Cutting a batch out of a mapped file is so cheap that no workers are needed; with `workers` the same batches, in the
same order, come from a `torch.utils.data.DataLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Tensor]


class Source(Protocol):
    """What batches are cut from: sequences by index, stored (`packing.Sequences`) or made (`synthetic.Generated`)."""

    def batch(self, indices: np.ndarray) -> Batch:
        """The sequences of these indices, int64 [B,T] each."""
        ...


class Batches:
    """A sized iterable of batches.

    It is not a `DataLoader`: a trainer then leaves the order alone, which already knows its rank.

    Args:
        sequences: what the indices point into.
        plan: called at every pass; returns the indices of each batch, from where training stands.
        length: how many batches a pass has.
        workers: processes that cut the batches; 0 cuts them here.
        pin_memory: put them where a GPU copies from without waiting.
    """

    def __init__(
        self,
        sequences: Source,
        plan: Callable[[], Iterator[np.ndarray]],
        length: int,
        *,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.sequences, self.plan, self.length = sequences, plan, length
        self.workers, self.pin_memory = workers, pin_memory

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        if self.workers:
            dataset, sampler = _ByBatch(self.sequences), _Plan(self.plan)
            pin = self.pin_memory
            return iter(DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=self.workers, pin_memory=pin))
        return self._cut_here()

    def _cut_here(self) -> Iterator[Batch]:
        for indices in self.plan():
            batch = self.sequences.batch(indices)
            yield {name: value.pin_memory() for name, value in batch.items()} if self.pin_memory else batch

    def state_dict(self) -> dict[str, int]:
        """Empty. A trainer takes a loader with a state for one that goes on where it stopped.

        This one does: `plan` asks the training progress, which the checkpoint holds already, and a count kept here as
        well could only disagree with it.
        """
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """There is nothing to restore."""


class _ByBatch(Dataset[Batch]):
    """A source with a whole batch for an item."""

    def __init__(self, sequences: Source) -> None:
        self.sequences = sequences

    def __getitem__(self, indices: np.ndarray) -> Batch:
        return self.sequences.batch(indices)


class _Plan:
    """A plan in a sampler's clothes."""

    def __init__(self, plan: Callable[[], Iterator[np.ndarray]]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.plan()
