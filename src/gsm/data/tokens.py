"""A corpus as token ids. The tokenizer is trained once and each split is encoded once; the cache holds both.

The keys of the cache are hashes of the corpus digest, which covers the division into splits, and of the tokenizer. So
whatever changes the ids changes the key.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gsm.data.cache import locked, writable
from gsm.data.corpus import Corpus
from gsm.data.ids import open_ids, read_index, write_ids
from gsm.data.tokenizer import Tokenizer
from gsm.files import read_json, write_json

log = logging.getLogger(__name__)
FORMAT = 2  # part of every key: raise it when the meaning of a cached file changes
SAMPLE = 20_000_000  # characters of the text that a tokenizer is trained on
PASSED_OVER = 50 * SAMPLE  # characters of a large corpus that are read for the sample
CHARACTERS = 8  # characters read for the sample for each token of a limited training: more than a token has
SLICE = 1 << 16  # characters of a slice of the sample


@dataclass(frozen=True)
class Split:
    """The cached token ids of one split.

    Attributes:
        name: "train" or "validation".
        path: the folder of the ids, uint16 or uint32; each document is its tokens and one end of text.
        tokens: number of ids, ends of text included.
        bytes: length of the text in UTF-8.
        spelled: bytes that the ids stand for. It differs from `bytes` where a tokenizer changes the text.
        dtype: of the ids.
        lost: bytes of the text that the ids do not spell.
    """

    name: str
    path: Path
    tokens: int
    bytes: int
    spelled: int
    dtype: str
    lost: int = 0

    def open(self) -> np.ndarray:
        """Return the ids [N], mapped from the file and not read."""
        return open_ids(self.path, self.tokens, self.dtype)


def find_or_train(corpus: Corpus, vocabulary: int, folder: Path, tokens: int | None = None) -> Tokenizer:
    """Return the BPE of at most `vocabulary` ids for a corpus, trained on its train split or on a sample of it.

    Args:
        corpus: the text.
        vocabulary: most ids.
        folder: the cache.
        tokens: number of tokens that training will take, which limits the text that is read for the sample.
    """
    most = min(PASSED_OVER, max(SAMPLE, CHARACTERS * tokens)) if tokens else PASSED_OVER
    parts = [vocabulary] if most == PASSED_OVER else [vocabulary, f"first {most}"]
    path = folder / f"tokenizer-{_key(corpus, *parts)}.json"
    tokenizer = _read_tokenizer(path)
    if tokenizer is None:
        with locked(path):
            tokenizer = _read_tokenizer(path) or _train(corpus, vocabulary, path, most)
    return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer of a file, or None if the file is missing or holds none."""
    state = read_json(path)
    try:
        return Tokenizer.from_state(state) if state else None
    except ValueError as error:
        log.warning("The cached file %s is damaged (%s) and is made again.", path, error)
        return None


def _train(corpus: Corpus, vocabulary: int, path: Path, most: int) -> Tokenizer:
    started = time.perf_counter()
    log.info("Training a BPE of %d ids on %s, once; this takes some seconds.", vocabulary, corpus.name)
    with closing(piece.text for piece in corpus.pieces("train")) as texts:  # one text may be larger than memory
        tokenizer = Tokenizer.train(sample(texts, passed_over=most), vocabulary)
    with writable(path.parent):
        write_json(path, tokenizer.to_state())
    log.info("Trained it in %.1f s; it is kept in %s.", time.perf_counter() - started, path)
    return tokenizer


def find_or_encode(
    corpus: Corpus,
    split: str,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    limit: int | None = None,
) -> Split:
    """Return the ids of one split of the corpus ("train" or "validation").

    Args:
        corpus: the text.
        split: which part of it.
        tokenizer: encodes it.
        folder: the cache.
        limit: most ids, the first ones; None: all.

    Raises:
        OSError: the ids are not cached and the folder cannot be written.
        ValueError: the text cannot be read.
    """
    parts = [tokenizer.digest] if limit is None else [tokenizer.digest, f"first {limit}"]
    path = folder / f"tokens-{_key(corpus, *parts)}" / split
    index = read_index(path)
    if index is None:
        with locked(path):
            # Another process may have finished between the two looks, and then this one waited for nobody.
            index = read_index(path) or _encode(corpus, split, tokenizer, path, limit)
    lost = index.get("lost", max(0, index["bytes"] - index["spelled"]))  # an older cache has no number
    return Split(split, path, lost=lost, **{name: index[name] for name in ("tokens", "bytes", "spelled", "dtype")})


def sample(texts: Iterator[str], most: int | None = None, passed_over: int | None = None) -> list[str]:
    """Return all texts if they have at most `most` characters, else slices of about that size, spread over the texts.

    Reading stops after the first `passed_over` characters.
    """
    most = SAMPLE if most is None else most
    taken: list[str] = []
    size = 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size > most:
            return _thinned(chain(taken, texts), most, PASSED_OVER if passed_over is None else passed_over)
    return taken


def _thinned(texts: Iterator[str], most: int, passed_over: int) -> list[str]:
    """Return every n-th slice. n is the smallest power of two that leaves at most `most` characters."""
    slices: list[str] = []
    stride, number, size, passed = 1, 0, 0, 0
    for part in (text[at : at + SLICE] for text in texts for at in range(0, len(text), SLICE)):
        passed += len(part)
        if number % stride == 0:
            slices.append(part)
            size += len(part)
        number += 1
        if size > most and len(slices) > 1:
            slices, stride = slices[::2], 2 * stride
            size = sum(map(len, slices))
        if passed >= passed_over:
            log.info("The tokenizer learns from %d of the first %d characters; later ones are not read.", size, passed)
            return slices
    log.info("The tokenizer learns from %d of all %d characters, in slices spread over them.", size, passed)
    return slices


def _encode(corpus: Corpus, split: str, tokenizer: Tokenizer, path: Path, limit: int | None) -> dict[str, Any]:
    """Write the ids and return their index."""
    started = time.perf_counter()
    log.info("Encoding the %s split of %s, once.", split, corpus.name)
    shown: dict[str, Any] = {"total": limit, "unit": "tok", "unit_scale": True, "mininterval": 1}
    bar = tqdm(desc=f"encoding {split}", disable=None, leave=False, **shown)
    with bar, logging_redirect_tqdm():  # log lines are written above the bar
        index = write_ids(path, corpus.pieces(split), tokenizer, limit=limit, report=bar.update)
    seconds = time.perf_counter() - started
    rate = index["tokens"] / max(seconds, 1e-9)
    log.info(f"Encoded {index['tokens']:,} tokens in {seconds:.1f} s ({rate:,.0f} a second); kept in {path}.")
    return index


def _key(corpus: Corpus, *parts: str | int) -> str:
    decides = [FORMAT, corpus.digest, *parts]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:20]
