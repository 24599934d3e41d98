"""A corpus as token ids: the tokenizer is trained once, each split is encoded once, both are kept in the cache.

The cache's keys are made of the corpus digest (which covers the division into splits) and of the tokenizer, so that
whatever changes the ids changes the file; a file is used for as long as nothing does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gsm.data.cache import find_or_make
from gsm.data.corpus import Corpus
from gsm.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)
FORMAT = 1  # part of every key: raise it when the meaning of a cached file changes


@dataclass(frozen=True)
class Split:
    """The cached token ids of one split.

    Attributes:
        name: "train" or "validation".
        path: a `.npy` file of uint16 or uint32 ids; every document is its tokens and one end of text.
        tokens: how many ids, ends of text included.
        bytes: length of the text in UTF-8.
    """

    name: str
    path: Path
    tokens: int
    bytes: int

    def open(self) -> np.ndarray:
        """The ids, mapped from the file and not read."""
        return np.load(self.path, mmap_mode="r")


def find_or_train(corpus: Corpus, vocabulary: int, folder: Path) -> Tokenizer:
    """The BPE of at most `vocabulary` ids that belongs to the corpus's train split."""
    path = folder / f"tokenizer-{_key(corpus, vocabulary)}.json"

    def make(file: BinaryIO) -> dict[str, Any]:
        started = time.perf_counter()
        log.info("Training a BPE of %d ids on %s, once; this takes some seconds.", vocabulary, corpus.name)
        tokenizer = Tokenizer.train(corpus.documents("train"), vocabulary)
        log.info("Trained it in %.1f s; it is kept in %s.", time.perf_counter() - started, path)
        file.write(json.dumps(tokenizer.to_state()).encode())
        return {"vocabulary": tokenizer.vocabulary}

    find_or_make(path, make)
    return Tokenizer.from_state(json.loads(path.read_text()))


def find_or_encode(corpus: Corpus, split: str, tokenizer: Tokenizer, folder: Path) -> Split:
    """The ids of one split of the corpus ("train" or "validation")."""
    path = folder / f"tokens-{_key(corpus, tokenizer.digest)}-{split}.npy"

    def make(file: BinaryIO) -> dict[str, Any]:
        started = time.perf_counter()
        log.info("Encoding the %s split of %s, once.", split, corpus.name)
        ids, length = _encode(corpus.documents(split), tokenizer)
        np.save(file, ids)
        log.info("Encoded %d tokens in %.1f s; kept in %s.", len(ids), time.perf_counter() - started, path)
        return {"tokens": len(ids), "bytes": length}

    return Split(split, path, **find_or_make(path, make))


def _encode(documents: Iterator[str], tokenizer: Tokenizer, at_once: int = 64) -> tuple[np.ndarray, int]:
    """All documents as one row of ids, and the bytes of their text."""
    kind = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
    rows, length = [], 0
    while texts := list(islice(documents, at_once)):
        length += sum(len(text.encode("utf-8", errors="replace")) for text in texts)
        rows += [np.array([*ids, tokenizer.end_of_text], dtype=kind) for ids in tokenizer.encode_batch(texts)]
    return np.concatenate(rows), length


def _key(corpus: Corpus, *parts: str | int) -> str:
    settings = [FORMAT, corpus.digest, *parts]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]
