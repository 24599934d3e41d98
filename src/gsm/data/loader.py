"""Batches by index, for a trainer.

Cutting a batch out of a mapped file is so cheap that no workers are needed; with `workers` the same batches, in the
same order, come from a `torch.utils.data.DataLoader`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch.multiprocessing
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gsm.errors import ConfigError

Batch = dict[str, Tensor]


LONGEST = 107 if sys.platform == "linux" else 103  # bytes of the path of a socket
OWN = len("/pymp-12345678/listener-12345678")  # bytes that Python's multiprocessing adds to the folder


def refuse_workers(workers: int) -> None:
    """Raise ConfigError for a temporary folder with too long a path for a socket.

    PyTorch sends file descriptors through a socket there. Without it, workers hand over no batch and a run waits for
    ever.
    """
    folder = tempfile.gettempdir()
    by_socket = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    if workers and by_socket and len(folder.encode()) + OWN > LONGEST:
        raise ConfigError(
            f"data.num_workers={workers} is not allowed because the path of the temporary folder {folder} is longer "
            f"than {LONGEST - OWN} bytes. Use data.num_workers=0, or a short TMPDIR such as /tmp."
        )


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
        workers: processes that cut the batches; 0 cuts them here.
        pin_memory: put batches into memory from which a GPU copies without waiting.
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
        """Return nothing. A trainer expects a loader with a state to continue from its place.

        This loader does: `plan` reads the training progress, which the checkpoint holds. A second count could only
        disagree with it.
        """
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore nothing."""


class _ByBatch(Dataset[Batch]):
    """A data set with a whole batch as an item."""

    def __init__(self, sequences: Source) -> None:
        self.sequences = sequences

    def __getitem__(self, indices: np.ndarray) -> Batch:
        return self.sequences.batch(indices)


class _Plan:
    """A plan as a sampler."""

    def __init__(self, plan: Callable[[], Iterator[np.ndarray]]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.plan()
