"""`TextData`: text packed into sequences, for training, validation and the n-gram baselines. B batch, T positions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gsm.data.base import DataModule, check_held_out, check_numbers
from gsm.data.cache import cache_folder
from gsm.data.corpus import SPLITS, Corpus, standard_library
from gsm.data.loader import Batches
from gsm.data.packing import (
    DOCUMENTS,
    Sequences,
    TrainingOrder,
    indices_outside,
    training_batches,
    validation_batches,
    validation_indices,
)
from gsm.data.tokenizer import Tokenizer, require_kind, require_vocabulary
from gsm.data.tokens import Split, find_or_encode, find_or_train
from gsm.data.tuning import divide
from gsm.errors import within

log = logging.getLogger(__name__)


class TextData(DataModule):
    """Packed text. Batches are dicts of int64 [B,T]: `tokens`, `targets` (shifted, -100 ignored) and `documents`.

    The order of training is a function of `seed` and of the number of batches that the trainer has finished: an
    interrupted run goes on with the next batch. Everything may also be used without a trainer.

    Args:
        vocabulary: number of the model's ids; a BPE is trained to this size.
        context: T, at least 2.
        batch_size: B on each device, at least 1.
        documents: how a sequence treats its documents: isolated, isolated_all_targets or stream (`gsm.data.packing`).
        tokenizer: "bpe", "bytes", the path of a tokenizer.json (also .xz or .gz, or the folder it lies in), or a ready
            `Tokenizer` (that of a checkpoint, for instance).
        end_of_text: the token of a tokenizer.json that ends a document; None: a usual one.
        path: a folder of text files, or one file; None: the standard library of the running interpreter.
        files: patterns of the files below `path` to take; None: all text files.
        validation: patterns of the files to hold out; None: documents by hash (see `Corpus`).
        text_field: the field of JSON lines or the column of parquet that holds the text; None: `text`.
        corpus: a source of text instead of `path`.
        max_tokens: most tokens to train on, the first ones; None: all.
        max_validation_tokens: the same for the validation split.
        held_out: "validation", or "tuning": a twentieth of the training text is held out instead, and the validation
            split neither encoded nor read (see `gsm.data.tuning`).
        seed: of the training order.
        validation_sequences: number of sequences of validation, spread evenly; None: all.
        cache_dir: the folder of the tokenizer and the ids; None: GSM_CACHE or `.cache/gsm`.

    Raises:
        ValueError: a number is out of range, the tokenizer is unknown or too large for `vocabulary`.
        FileNotFoundError: there is nothing at `path`, or at `tokenizer`.
    """

    resumes = True

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        batch_size: int,
        documents: str = "isolated",
        tokenizer: str | Tokenizer = "bpe",
        end_of_text: str | None = None,
        path: str | None = None,
        files: str | list[str] | None = None,
        validation: str | list[str] | None = None,
        text_field: str | None = None,
        corpus: Corpus | None = None,
        max_tokens: int | None = None,
        max_validation_tokens: int | None = None,
        held_out: str = "validation",
        seed: int = 0,
        validation_sequences: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        check_numbers(batch_size, validation_sequences, seed)
        within(2, context=context)
        within(context + 1, max_tokens=max_tokens, max_validation_tokens=max_validation_tokens)
        self._chosen = chosen_tokenizer(tokenizer, end_of_text, vocabulary)
        if documents not in DOCUMENTS:
            raise ValueError(f"documents must be {' or '.join(DOCUMENTS)}, got {documents}")
        self.documents, self.held_out = documents, check_held_out(held_out)
        choices = {"files": files, "validation": validation, "text_field": text_field}
        chosen = {name: value for name, value in choices.items() if value is not None}
        if corpus and (chosen or path is not None):
            raise ValueError(f"path, {', '.join(choices)} must be left out with a corpus, got {path}, {chosen}")
        self.corpus = corpus or _corpus(path, chosen)
        if self.corpus.notes is None:
            self.corpus.notes = cache_folder(cache_dir)
        self.vocabulary, self.context, self.batch_size, self.seed = vocabulary, context, batch_size, seed
        self.validation_sequences, self.cache_dir = validation_sequences, cache_dir
        self.limits = {"train": max_tokens, "validation": max_validation_tokens}
        self._splits: dict[str, Split] = {}

    def prepare_data(self) -> None:
        """Train the tokenizer and encode the text, unless the cache has them (seconds, the first time)."""
        _ = [self.split(name) for name in SPLITS]

    def setup(self, stage: str | None = None) -> None:
        """Open the cached ids; make them where `prepare_data` ran on another machine."""
        _ = self.train_set, self.validation_set

    @cached_property
    def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tokenizer of this text (its `vocabulary` may be smaller than the model's)."""
        if isinstance(self._chosen, Tokenizer):
            return self._chosen
        folder = cache_folder(self.cache_dir)
        return find_or_train(self.corpus, self.vocabulary, folder, tokens=self.limits["train"])

    def split(self, name: str) -> Split:
        """Return the cached ids of one split ("train" or "validation"). Only this split is encoded.

        `held_out` decides which text the validation split is.
        """
        if name not in self._splits:
            if self.held_out == "tuning":
                self._splits |= divide(self._encoded("train"), self.tokenizer, self.limits["validation"])
            else:
                self._splits[name] = self._encoded(name)
        return self._splits[name]

    def _encoded(self, name: str) -> Split:
        folder = cache_folder(self.cache_dir)
        made = find_or_encode(self.corpus, name, self.tokenizer, folder, limit=self.limits[name])
        if made.lost:
            log.warning(
                "The tokenizer cannot spell %d of the %d bytes of the %s split. Bits per byte leave them out.",
                *(made.lost, made.bytes, name),
            )
        return made

    @cached_property
    def train_set(self) -> Sequences:
        """All training sequences; `train_set[i]` is one, a dict of int64 [T]."""
        return self._open("train")

    @cached_property
    def validation_set(self) -> Sequences:
        """All validation sequences; `validation()` yields those of the validation loss."""
        return self._open("validation")

    @cached_property
    def order(self) -> TrainingOrder:
        """The order in which training takes the sequences."""
        return TrainingOrder(len(self.train_set), self.seed)

    @property
    def token_bytes_V(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`bytes_of_tokens` of the validation split."""
        return self.bytes_of_tokens("validation")

    def bytes_of_tokens(self, split: str) -> np.ndarray:
        """Return bytes of the text for each id [V]; their sum over a split is the length of its text.

        They are the tokenizer's `token_lengths_V`, int64, if its tokens spell the text. Where a normalizer changes the
        text, they are float32: these lengths times (bytes of the split's text that are not lost) / (bytes that its
        tokens spell).
        """
        lengths_V, made = self.tokenizer.token_lengths_V, self.split(split)
        if made.bytes == made.spelled and not made.lost:
            return lengths_V
        return (lengths_V * ((made.bytes - made.lost) / max(1, made.spelled))).astype(np.float32)

    def train_dataloader(self) -> Batches:
        """Return one pass over the data, from the trainer's place; a whole number of optimizer steps."""
        a_step = self.batch_size * self.world * self.accumulated
        length = max(1, len(self.train_set) // a_step) * self.accumulated
        return Batches(self.train_set, partial(self._training_plan, length), length, pin_memory=self.on_gpu)

    def val_dataloader(self) -> Batches:
        """Return the validation sequences in order; with several ranks each takes its share."""
        batches = validation_batches(len(self.validation_set), limit=self.validation_sequences, **self._batch_share)
        return Batches(self.validation_set, partial(iter, batches), len(batches), pin_memory=self.on_gpu)

    def consumed(self, sequences: int) -> Iterator[dict[str, Tensor]]:
        """Yield the first `sequences` training sequences of a run (all ranks together), one by one, in order.

        A run has consumed steps x accumulated batches x ranks x batch_size of them.
        """
        return self.train_set.each(self.order.indices(self.first_sequence, self.first_sequence + sequences))

    def validation(self) -> Iterator[dict[str, Tensor]]:
        """Yield the sequences that the validation loss averages over, one by one, in order."""
        return self.validation_set.each(validation_indices(len(self.validation_set), self.validation_sequences))

    def of_length(self, length: int, most: int, split: str = "validation") -> list[dict[str, Tensor]]:
        """Return at most `most` sequences of another length, spread evenly. Raise ValueError for a shorter split."""
        sequences = self._open(split, length)
        return list(sequences.each(validation_indices(len(sequences), most)))

    def outside(self, windows: int, length: int, most: int | None, split: str = "validation") -> np.ndarray:
        """Return at most `most` (None: all) sequences that share no id with `of_length(length, windows, split)`.

        They are indices, int64, spread evenly over the rest of the split. Raise ValueError where nothing is left.
        """
        free = indices_outside(self._open(split, self.context), self._open(split, length), windows)
        if not len(free):
            size = f"of {self.split(split).tokens:,} tokens"
            raise ValueError(f"outside must leave a sequence of the {split} split {size}, got {windows},{length}")
        return free[validation_indices(len(free), most)]

    def headline(self) -> dict[str, str]:
        """Return the lines about the data in the header of a run."""
        about = self.description()
        of_them = " of the same, to tune on" if self.marks else ""
        return {
            "data": "{corpus}: {train_tokens:,} tokens to train on, {validation_tokens:,} held out".format(**about)
            + of_them,
            "tokens": "{tokenizer}, {tokenizer_vocabulary:,} ids, {bytes_per_token:.2f} bytes each".format(**about),
        }

    def description(self, splits: Sequence[str] = SPLITS) -> dict[str, Any]:
        """Return the facts about the data in a run's summary. Runs with another `digest` do not compare.

        Only the text of `splits` is encoded and counted.
        """
        made = {name: self.split(name) for name in splits}
        return {
            **self.corpus.description(),
            **self.marks,
            "bytes": sum(split.bytes for split in made.values()),
            "tokens": sum(split.tokens for split in made.values()),
            **{f"{name}_bytes": split.bytes for name, split in made.items()},
            **{f"{name}_tokens": split.tokens for name, split in made.items()},
            "tokenizer": self.tokenizer.kind,
            "tokenizer_vocabulary": self.tokenizer.vocabulary,
            **({"bytes_per_token": self.bytes_per_token} if "validation" in made else {}),
        }

    def fingerprint(self) -> dict[str, str | int]:
        """Return the facts that determine the training ids, without the run's seed and batches.

        The digest of the corpus covers the division into splits.
        """
        limits = {"max_tokens": self.limits["train"], "max_validation_tokens": self.limits["validation"]}
        return {
            "corpus": self.corpus.digest,
            "tokenizer": self.tokenizer.digest,
            "context": self.context,
            "documents": self.documents,
            **{name: limit or "all" for name, limit in limits.items()},
            **self.marks,
        }

    def _open(self, split: str, context: int | None = None) -> Sequences:
        return Sequences(self.split(split), context or self.context, self.tokenizer.end_of_text, self.documents)

    def _training_plan(self, length: int) -> Iterator[np.ndarray]:
        start = self.first_sequence + self.batches_done * self.world * self.batch_size
        return training_batches(self.order, start=start, batches=length, **self._batch_share)


def _corpus(path: str | None, chosen: dict[str, Any]) -> Corpus:
    if path is None and chosen:
        raise ValueError(f"{', '.join(chosen)} must be left out without a path (data=folder data.path=...)")
    return standard_library() if path is None else Corpus(path, **chosen)


def chosen_tokenizer(tokenizer: str | Tokenizer, end_of_text: str | None, vocabulary: int) -> Tokenizer | None:
    """Return the tokenizer, or None if it has to be trained first."""
    if end_of_text is not None and tokenizer in ("bpe", "bytes"):
        raise ValueError(
            f"end_of_text must be left out with tokenizer={tokenizer}, which has its own, got {end_of_text}"
        )
    if isinstance(tokenizer, str):
        if tokenizer in ("bpe", "bytes"):
            require_vocabulary(tokenizer, vocabulary)
            return Tokenizer.plain_bytes() if tokenizer == "bytes" else None
        is_path = "/" in tokenizer or tokenizer.endswith((".json", ".json.xz", ".json.gz")) or Path(tokenizer).exists()
        if not is_path:
            require_kind(tokenizer)
        tokenizer = Tokenizer.from_file(tokenizer, end_of_text)
    tokenizer.require_fit(vocabulary)
    return tokenizer
