"""`SyntheticData`: sequences of a task, made when they are needed. B batch, T positions.

Sequence number i is a function of (seed, i) and, while lengths still grow, of the step that takes it: nothing is
stored, nothing repeats, and a run that was interrupted goes on with the very next sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsm.data.base import DataModule, check_held_out, check_numbers
from gsm.data.loader import Batches
from gsm.data.packing import validation_batches
from gsm.data.recall import Task
from gsm.errors import within
from gsm.models.checks import IGNORED

# Seeds of held-out sequences: the same for every seed of a run, and never trained on.
HELD_OUT = 2**32 - 1
UNSEEN = {"validation": HELD_OUT, "tuning": HELD_OUT - 1}  # by their use


class Generated:
    """A sequence for every number.

    Args:
        task: draws them.
        seed: of all of them.
        length: of the sequence with a given number.
        whole: the length that they grow to; None: each is the task in full.
    """

    def __init__(self, task: Task, seed: int, length: Callable[[int], int], whole: int | None = None) -> None:
        self.task, self.seed, self.length, self.whole = task, seed, length, whole

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence: `tokens`, `targets` and `documents`, int64 [T] each."""
        return {name: value_BT[0] for name, value_BT in self.batch([index]).items()}

    def batch(self, indices: np.ndarray | Sequence[int]) -> dict[str, Tensor]:
        """Return the sequences of these numbers, int64 [B,T] each: `tokens`, `targets` and `documents`.

        All have the length of the first one. The number -1, which evens out ranks, gives a sequence without targets.
        """
        length = self.length(int(indices[0]))
        numbers = (np.random.default_rng([self.seed, max(int(i), 0)]) for i in indices)
        drawn = [self.task.draw(random, length, self.whole) for random in numbers]
        token_BT, target_BT = (torch.from_numpy(np.stack(rows)) for rows in zip(*drawn, strict=True))
        target_BT[torch.as_tensor(np.asarray(indices)) < 0] = IGNORED
        return {"tokens": token_BT, "targets": target_BT, "documents": torch.zeros_like(token_BT)}


class MadeData(DataModule, ABC):
    """Sequences that are made by number, in order, and not stored. A subclass makes one, and chooses its length.

    Attributes:
        validation_set: the sequences of validation, by number.
        validation_sequences: number of sequences of validation.
    """

    measures_accuracy, resumes = True, True
    validation_set: Any
    validation_sequences: int

    @abstractmethod
    def training_set(self, length: Callable[[int], int]) -> Any:
        """The training sequences by number, T a function of the number."""

    @abstractmethod
    def length_at(self, step: int) -> int:
        """T of the sequences of a step."""

    def train_dataloader(self) -> Batches:
        """All batches that are left; their number follows from the trainer's steps."""
        total = self.steps * self.accumulated
        a_step = self.batch_size * self.world * self.accumulated

        def plan() -> Iterator[np.ndarray]:
            for batch in range(self.batches_done, total):
                first = self.first_sequence + (batch * self.world + self.rank) * self.batch_size
                yield np.arange(first, first + self.batch_size)

        train = self.training_set(lambda number: self.length_at((number - self.first_sequence) // a_step))
        return Batches(train, plan, total, pin_memory=self.on_gpu)

    def val_dataloader(self) -> Batches:
        """The validation sequences; with several ranks each takes its share."""
        batches = validation_batches(self.validation_sequences, limit=None, **self._batch_share)
        return Batches(self.validation_set, partial(iter, batches), len(batches), pin_memory=self.on_gpu)

    def validation(self) -> Iterator[dict[str, Tensor]]:
        """The sequences that validation averages over, one by one, in order."""
        return (self.validation_set[index] for index in range(self.validation_sequences))


class SyntheticData(MadeData):
    """Batches of a task, dicts of int64 [B,T] like those of `TextData`; validation also measures accuracy.

    With `shortest`, training begins with short sequences, in which a task is learned in fewer and cheaper steps.

    Args:
        task: see `gsm.data.recall`, `gsm.data.mad` and `gsm.data.state_tracking`.
        vocabulary: how many ids the model has.
        context: T, at validation and at the end of training.
        batch_size: B on each device.
        seed: of the training sequences.
        validation_sequences: how many sequences validation takes.
        held_out: "validation", or "tuning" for other sequences than the reported ones.
        shortest: T at the beginning; None: `context` throughout.
        grow_from, grow_until: between these fractions of all steps T grows exponentially, in multiples of 8.

    Raises:
        ValueError: a number is out of range, or the task does not fit into `context` or `vocabulary`.
    """

    def __init__(
        self,
        *,
        task: Task,
        vocabulary: int,
        context: int,
        batch_size: int,
        seed: int = 0,
        validation_sequences: int = 64,
        held_out: str = "validation",
        shortest: int | None = None,
        grow_from: float = 0.0,
        grow_until: float = 0.5,
    ) -> None:
        super().__init__()
        check_numbers(batch_size, validation_sequences, seed)
        if task.vocabulary > vocabulary:
            raise ValueError(f"size.vocabulary must be at least {task.vocabulary}, the task's ids, got {vocabulary}")
        task.check(context)
        within(task.least, context, shortest=shortest)
        within(0, 1, grow_until=grow_until)
        within(0, grow_until, grow_from=grow_from)
        self.task: Task = task  # pyright: ignore[reportIncompatibleVariableOverride]
        self.vocabulary, self.context, self.batch_size = vocabulary, context, batch_size
        self.seed, self.validation_sequences = seed, validation_sequences
        self.shortest, self.grow_from, self.grow_until = shortest, grow_from, grow_until
        self.held_out = check_held_out(held_out)
        self.validation_set = Generated(task, UNSEEN[held_out], lambda _: context)

    def length(self, progress: float) -> int:
        """T after this fraction of the training steps."""
        if self.shortest is None or progress >= self.grow_until:
            return self.context
        grown = max(0.0, progress - self.grow_from) / max(self.grow_until - self.grow_from, 1e-9)
        return max(self.shortest, int(self.shortest * (self.context / self.shortest) ** grown) // 8 * 8)

    def length_at(self, step: int) -> int:
        """T of the sequences of a step."""
        return self.length(step / self.steps)

    def training_set(self, length: Callable[[int], int]) -> Generated:
        """The training sequences, with T as a function of the number."""
        return Generated(self.task, self.seed, length, self.context)

    def of_length(self, length: int, most: int, split: str = "validation") -> list[dict[str, Tensor]]:
        """Held-out sequences of another length. Raises ValueError for one that the task does not fit into."""
        generated = Generated(self.task, UNSEEN[self.held_out], lambda _: length)
        return [generated[index] for index in range(min(most, self.validation_sequences))]

    @cached_property
    def questions(self) -> int:
        """Targets in the sequences of validation."""
        return sum(int((batch["targets"] != IGNORED).sum()) for batch in self.validation())

    def headline(self) -> dict[str, str]:
        """Return the lines about the data in the header of a run."""
        grown = f", from {self.shortest} tokens to {self.context}" if self.shortest else ""
        return {"data": f"{type(self.task).__name__}, made on the fly{grown}; {self.questions:,} held-out questions"}

    def description(self) -> dict[str, Any]:
        """Return the facts about the data in a run's summary, for any splits."""
        return {
            "task": type(self.task).__name__,
            **self.marks,
            **vars(self.task),
            "context": self.context,
            "validation_answers": self.questions,
        }

    def fingerprint(self) -> dict[str, str | int]:
        """Return the facts that determine the training sequences, without the run's seed and batches."""
        lengths = {name: getattr(self, name) for name in ("context", "shortest", "grow_from", "grow_until")}
        facts = {"task": type(self.task).__name__, **self.marks, **vars(self.task), **lengths}
        return {name: value if type(value) in (str, int) else str(value) for name, value in facts.items()}
