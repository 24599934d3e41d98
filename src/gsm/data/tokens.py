"""A corpus as token ids: the tokenizer is trained once, each split is encoded once, both are kept in the cache.

The cache's keys are made of the corpus digest (which covers the division into splits) and of the tokenizer, so that
whatever changes the ids changes the place; what lies there is used for as long as nothing does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gsm import files
from gsm.data import shards
from gsm.data.cache import locked, read_json, write_json
from gsm.data.corpus import Corpus
from gsm.data.encode import Bar, cores, encode_pieces, id_type
from gsm.data.shards import ShardedIds, ShardWriter, read_index
from gsm.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)
FORMAT = 1  # part of every key: raise it when the meaning of a cached file changes
SAMPLE = 20_000_000  # characters: a tokenizer is trained on at most so many
PASSED_OVER = 50 * SAMPLE  # characters: how much of a large corpus is looked through for the sample, at most
CHARACTERS = 8  # so many for each token that will be trained on, where that is less: more than a token has, not by much
SLICE = 1 << 16  # characters: a sample consists of slices of this size
FEW = 1 << 25  # bytes: less text than this is encoded before other processes have started


@dataclass(frozen=True)
class Split:
    """The cached token ids of one split.

    Attributes:
        name: "train" or "validation".
        path: a folder with files of uint16 or uint32 ids; every document is its tokens and one end of text.
        tokens: how many ids, ends of text included.
        bytes: length of the text in UTF-8.
        spelled: bytes that the ids stand for by themselves. Only a tokenizer that changes the text makes it another
            number than `bytes`.
        shard: ids in each file but the last.
        dtype: of the ids.
        skipped: what is wrong with files that were damaged and left out, a sentence each.
    """

    name: str
    path: Path
    tokens: int
    bytes: int
    spelled: int
    shard: int
    dtype: str
    skipped: tuple[str, ...] = ()

    def open(self) -> ShardedIds:
        """The ids, mapped from the files and not read."""
        return ShardedIds(self.path, self.tokens, self.shard, self.dtype)


def find_or_train(corpus: Corpus, vocabulary: int, folder: Path, tokens: int | None = None) -> Tokenizer:
    """The BPE of at most `vocabulary` ids that belongs to the corpus's train split, or to a sample of a large one.

    With `tokens`, how many will be trained on, hardly more text than they need is looked through for the sample.
    """
    most = min(PASSED_OVER, max(SAMPLE, CHARACTERS * tokens)) if tokens else PASSED_OVER
    parts = [vocabulary] if most == PASSED_OVER else [vocabulary, f"first {most}"]
    path = folder / f"tokenizer-{_key(corpus, *parts)}.json"
    known = _read_tokenizer(path)
    if known is None:
        with locked(path) as held:
            if held:
                files.sweep(folder, name=path.name)
            known = _read_tokenizer(path) or _train(corpus, vocabulary, path, most)
    return known


def _read_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a sound file; else None, with a warning if there is a damaged one."""
    if not path.exists():
        return None
    known = read_json(path) or {}
    try:
        tokenizer = Tokenizer.from_state(known["state"])
        if tokenizer.digest == known["digest"]:
            return tokenizer
        damage = "its digest has changed"
    except (KeyError, TypeError, ValueError) as error:
        damage = repr(error)
    log.warning("The cached file %s is damaged (%s) and is made again.", path, damage)
    return None


def _train(corpus: Corpus, vocabulary: int, path: Path, most: int) -> Tokenizer:
    started = time.perf_counter()
    log.info("Training a BPE of %d ids on %s, once; this takes some seconds.", vocabulary, corpus.name)
    with closing(_texts(corpus)) as texts:
        tokenizer = Tokenizer.train(sample(texts, passed_over=most), vocabulary)
    write_json(path, {"state": tokenizer.to_state(), "digest": tokenizer.digest})
    log.info("Trained it in %.1f s; it is kept in %s.", time.perf_counter() - started, path)
    return tokenizer


def _texts(corpus: Corpus) -> Generator[str, None, None]:
    """The train split in pieces: a file that holds one text may be larger than memory."""
    for piece in corpus.pieces("train"):
        yield piece.text


def find_or_encode(
    corpus: Corpus,
    split: str,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    limit: int | None = None,
    workers: int | None = None,
) -> Split:
    """The ids of one split of the corpus ("train" or "validation"); files that were left out are named once more.

    Args:
        corpus: the text.
        split: which part of it.
        tokenizer: what encodes it.
        folder: the cache.
        limit: at most so many ids, the first ones; None: all.
        workers: processes that encode; None: as many as there are cores, or this one alone if there is little text.

    Raises:
        OSError: nothing is cached and the folder cannot be written.
        ValueError: the text cannot be read.
    """
    parts = [tokenizer.digest] if limit is None else [tokenizer.digest, f"first {limit}"]
    path = folder / f"tokens-{_key(corpus, *parts)}" / split
    index = read_index(path)
    if index is None:
        with locked(path) as held:
            if held:
                files.sweep(path)  # what a process that was killed left half written
            # Another process may have finished between the two looks, and then waited for nobody.
            index = read_index(path) or _encode(corpus, split, tokenizer, path, limit, workers)
    known = {name: index[name] for name in ("tokens", "bytes", "spelled", "shard", "dtype")}
    skipped = tuple(index.get("skipped", ()))
    if skipped:
        log.warning("Of %s's %s split %d files are skipped: %s.", corpus.name, split, len(skipped), "; ".join(skipped))
    return Split(split, path, **known, skipped=skipped)


def sample(texts: Iterator[str], most: int | None = None, passed_over: int | None = None) -> list[str]:
    """All texts if they have at most `most` characters together, else as many in slices from all over them.

    Of all that comes after the first `passed_over` characters nothing is read.
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
    """Every n-th slice, n the smallest power of two at which they have at most `most` characters."""
    kept: list[str] = []
    stride, number, size, passed = 1, 0, 0, 0
    for part in (text[at : at + SLICE] for text in texts for at in range(0, len(text), SLICE)):
        passed += len(part)
        if number % stride == 0:
            kept.append(part)
            size += len(part)
        number += 1
        if size > most and len(kept) > 1:
            kept, stride = kept[::2], 2 * stride
            size = sum(map(len, kept))
        if passed >= passed_over:
            log.info("The tokenizer learns from %d of the first %d characters; later ones are not read.", size, passed)
            return kept
    log.info("The tokenizer learns from %d of all %d characters, in slices spread over them.", size, passed)
    return kept


def _encode(
    corpus: Corpus, split: str, tokenizer: Tokenizer, path: Path, limit: int | None, workers: int | None
) -> dict[str, Any]:
    """Writes the shards and returns their index."""
    started, size = time.perf_counter(), corpus.size(split)
    lengths = tokenizer.token_lengths_V
    writer = ShardWriter(path, lengths_V=lengths, dtype=id_type(tokenizer), shard=shards.SHARD, limit=limit)
    before = writer.done.tokens
    bar = Bar(split, size, limit, before)
    little = min(size or FEW, 4 * limit if limit else FEW) < FEW
    workers = workers or (1 if little else cores())
    log.info("Encoding the %s split of %s, once.", split, corpus.name)
    try:
        pieces = islice(corpus.pieces(split, bar.moved), writer.done.pieces, None)
        with closing(encode_pieces(pieces, tokenizer, workers)) as parcels:
            for encoded in parcels:
                writer.write(encoded)
                bar.wrote(writer.done.tokens)
                if writer.full:
                    break
        index = writer.finish(skipped=corpus.skipped(split))
    finally:
        writer.abandon()
        bar.close()
    seconds = time.perf_counter() - started
    rate = (index["tokens"] - before) / max(seconds, 1e-9)
    log.info(f"Encoded {index['tokens']:,} tokens in {seconds:.1f} s ({rate:,.0f} a second); kept in {path}.")
    return index


def _key(corpus: Corpus, *parts: str | int) -> str:
    settings = [FORMAT, corpus.digest, *parts]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]
