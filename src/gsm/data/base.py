"""`DataModule`: the members of data that a training run uses, each with a default. B batch, T positions.

Data of one's own inherit it and define `train_dataloader` and `val_dataloader`, which give dicts of int64 [B,T]:

    tokens      ids below the model's vocabulary
    targets     optional; -100 is ignored. Without: the next token of the same document
    documents   optional; which document a token belongs to, ascending along a row. Without: a sequence is one document

A yaml that names it is enough: `python train.py --config-dir=mine data=mine`. The members below are extras.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
from torch import Tensor

from gsm.errors import ConfigError, within
from gsm.models.checks import IGNORED

if TYPE_CHECKING:
    from gsm.data.recall import Task
    from gsm.data.tokenizer import Tokenizer

HELD_OUT_FOR = ("validation", "tuning")  # the reported text, or a part of the training data


def check_numbers(batch_size: int, validation_sequences: int | None, seed: int) -> None:
    """Raise ValueError for numbers of a data module that are out of range."""
    within(1, 10**6, batch_size=batch_size)
    within(1, 10**7, validation_sequences=validation_sequences)
    within(0, 2**32 - 3, seed=seed)  # the two numbers above are the seeds of held-out data (gsm.data.synthetic)


def next_tokens(tokens_BT: Tensor, document_BT: Tensor | None = None) -> Tensor:
    """Return targets int64 [B, T]: the next token of the same document, -100 where there is none."""
    target_BT = torch.full_like(tokens_BT, IGNORED)
    target_BT[:, :-1] = tokens_BT[:, 1:]
    if document_BT is not None:
        target_BT[:, :-1][document_BT[:, 1:] != document_BT[:, :-1]] = IGNORED
    return target_BT


class DataModule(lightning.LightningDataModule):
    """A `LightningDataModule` with all extras at their defaults, and with its position in a run.

    **Exact resume**: a run that resumes calls `train_dataloader()` again, and the loader must skip the first
    `batches_done` batches of this rank. Otherwise the data start over, and the run differs from one without an
    interruption. The same holds for a data module with its own random numbers, unless it keeps their state in
    Lightning's `state_dict` and `load_state_dict`. The loader must be sized or endless, and a pass must be a whole
    number of optimiser steps of `accumulated` batches each.

    Attributes:
        task: a synthetic task, which names its tokens and questions; None for text.
        tokenizer: travels in the checkpoint, for generate.py and evaluate.py; None: ids stand for themselves.
        token_bytes_V: bytes of text that each id stands for; validation then logs bits per byte.
        measures_accuracy: whether validation counts how often the likeliest token is the target.
        resumes: True if `train_dataloader` skips the batches that are done; a run that resumes without it warns.
        held_out: the text of validation: `validation`, which tables report, or `tuning`, to choose a value by.
        first_sequence: the place in the order of training where the run begins: after the sequences that the run it
            starts from has read.
        context, batch_size: T and B on each device, 0 if they vary; for the header of a run, and to check that a
            resumed run has steps of the same size.
    """

    task: Task | None = None
    tokenizer: Tokenizer | None = None
    token_bytes_V: np.ndarray | None = None
    measures_accuracy: bool = False
    resumes: bool = False
    held_out: str = "validation"
    first_sequence: int = 0
    context: int = 0
    batch_size: int = 0

    def __str__(self) -> str:
        """Return a short description; Lightning's needs loaders with a dataset."""
        return f"{type(self).__name__}: batches of {self.batch_size} sequences of {self.context} tokens"

    def fingerprint(self) -> Mapping[str, str | int]:
        """Return the facts that determine the training ids, without seed and batches. A run resumes only with
        equal facts. Empty: nothing is compared."""
        return {}

    def headline(self) -> dict[str, str]:
        """Return the lines about the data in the header of a run."""
        return {"data": type(self).__name__}

    def description(self) -> dict[str, Any]:
        """Return the facts about the data in a run's summary."""
        return dict(self.fingerprint())

    def validation(self) -> Iterator[dict[str, Tensor]]:
        """Yield the sequences of validation one by one: tokens, targets and documents, int64 [T] each.

        Pictures and measurements take the first ones."""
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed, which training must not notice
            batches = iter(self.val_dataloader())
        for batch in batches:
            whole = {"documents": torch.zeros_like(batch["tokens"]), **batch}
            whole = {"targets": next_tokens(whole["tokens"], whole["documents"]), **whole}
            for row in range(len(batch["tokens"])):
                yield {name: value_BT[row] for name, value_BT in whole.items()}

    def of_length(self, length: int, most: int, split: str = "validation") -> Sequence[Mapping[str, Tensor]]:
        """Return at most `most` sequences of another length, to measure overlap by length. Raise ValueError if none."""
        raise ValueError(f"{type(self).__name__} has no sequences of {length} tokens: it does not define of_length")

    def consumed(self, sequences: int) -> Iterator[Mapping[str, Tensor]] | None:
        """Yield the first `sequences` that a run trains on, all ranks together, to count n-grams; None: no n-grams."""
        return None

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text per validation target: bits per byte = loss / ln 2 / this. None without `token_bytes_V`.

        The mean is over the targets of the validation loss; an end of text is one of them and has 0 bytes.
        """
        if self.token_bytes_V is None:
            return None
        targets = np.concatenate([row["targets"].numpy() for row in self.validation()])
        return float(self.token_bytes_V[targets[targets != IGNORED]].mean(dtype=np.float64))

    @property
    def marks(self) -> dict[str, str]:
        """The entry that a tuning split adds to the summary and the fingerprint; empty for validation."""
        return {} if self.held_out == "validation" else {"held_out": self.held_out}

    @property
    def batches_done(self) -> int:
        """Batches of finished steps, on each rank; 0 without a trainer. A loader may have fetched more."""
        return self.trainer.global_step * self.accumulated if self.trainer else 0

    @property
    def accumulated(self) -> int:
        """Batches that make up a step."""
        return self.trainer.accumulate_grad_batches if self.trainer else 1

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return max(1, self.trainer.max_steps) if self.trainer else 1

    @property
    def rank(self) -> int:
        """The number of this process among those that share the data; tensor-parallel ranks have the same number."""
        return self._shares["rank"]

    @property
    def world(self) -> int:
        """The number of processes that share the data."""
        return self._shares["num_replicas"]

    @property
    def on_gpu(self) -> bool:
        """Whether batches go to a GPU."""
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @property
    def _batch_share(self) -> dict[str, int]:
        """The share of this process in every batch, for `training_batches` and `validation_batches`."""
        return {"batch_size": self.batch_size, "rank": self.rank, "world": self.world}

    @property
    def _shares(self) -> dict[str, int]:
        shares = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return dict(shares or {"num_replicas": 1, "rank": 0})


def check_held_out(name: str) -> str:
    """Return the same name. Raise ValueError for one that is not in `HELD_OUT_FOR`."""
    if name not in HELD_OUT_FOR:
        raise ValueError(f"held_out must be {' or '.join(HELD_OUT_FOR)}, got {name}")
    return name


def require_data_module(data: object) -> DataModule:
    """Return the same object. Raise ConfigError if it is no `DataModule`."""
    if not isinstance(data, DataModule):
        raise ConfigError(f"data must inherit gsm.data.base.DataModule, got {type(data).__name__}")
    return data
