"""Encode text into one file of token ids, and map it.

    <folder>/ids.bin      the ids and nothing else
    <folder>/index.json   counts of the whole file; appears last

Text and tokenizer determine every byte of ids.bin. So two processes may write it at once, where a disk has no locks:
they write the same bytes to the same places, and neither shortens the file before it is complete. Ids without an index
are written again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gsm.data.cache import writable
from gsm.data.reading import Piece
from gsm.data.tokenizer import Tokenizer
from gsm.files import read_json, write_json

log = logging.getLogger(__name__)
IDS, INDEX = "ids.bin", "index.json"
PARCEL = 1 << 19  # characters that are encoded at a time, at least, but for the last
MOST_PIECES = 1024  # pieces that are encoded at a time


def write_ids(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    report: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    """Write the ids of a text and their index, and return the index.

    Args:
        folder: made if it is missing.
        pieces: the text.
        tokenizer: encodes it.
        limit: most ids in the file; None: no limit. A piece that is cut has its share of the bytes.
        report: takes the number of ids of each piece once they are written.

    Returns:
        ``tokens``: ids, ends of text included; ``bytes``: UTF-8 bytes of the text; ``spelled``: bytes that the ids
        stand for, another number where a tokenizer loses or adds bytes; ``lost``: bytes of the text that are not among
        them; ``dtype``.

    Raises:
        OSError: the folder cannot be written.
    """
    tokens = text = spelled = lost = 0
    lengths_V = tokenizer.token_lengths_V
    dtype = np.dtype("uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32")  # two bytes while the ids fit
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
        (folder / IDS).touch()
        file = (folder / IDS).open("r+b")
    with file:
        for piece, ids in _encoded(pieces, tokenizer):
            whole_N = np.array(ids, dtype)
            taken_N = whole_N if limit is None else whole_N[: limit - tokens]
            raw, length = piece.text.encode("utf-8", errors="replace"), int(lengths_V[taken_N].sum())
            sizes = [len(raw), _lost(raw, tokenizer, ids)]
            if len(taken_N) < len(whole_N):
                sizes = [round(size * (length / max(1, int(lengths_V[whole_N].sum())))) for size in sizes]
            with writable(folder):
                file.write(taken_N.tobytes())
            tokens, text, spelled, lost = tokens + len(taken_N), text + sizes[0], spelled + length, lost + sizes[1]
            report(len(taken_N))
            if tokens == limit:
                break
        index = {"tokens": tokens, "bytes": text, "spelled": spelled, "lost": lost, "dtype": dtype.name}
        with writable(folder):
            file.truncate(tokens * dtype.itemsize)  # another limit never shares the folder
            file.flush()
            os.fsync(file.fileno())
            write_json(folder / INDEX, index)
    return index


def _lost(text: bytes, tokenizer: Tokenizer, ids: list[int]) -> int:
    """Return how many bytes of a text are not among those of its ids; only a tokenizer.json may lose some."""
    spelled = b"".join(map(tokenizer.token_bytes, ids)) if tokenizer.kind == "file" else text
    if spelled == text:
        return 0
    there, here = (np.bincount(np.frombuffer(raw, np.uint8), minlength=256) for raw in (text, spelled))
    return int(np.maximum(there - here, 0).sum())


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Piece, list[int]]]:
    """Yield parts of pieces with their ids, an end of text behind each document. Many are encoded at a time."""
    parcel: list[Piece] = []
    size = 0

    def encode() -> Iterator[tuple[Piece, list[int]]]:
        for piece, ids in zip(parcel, tokenizer.encode_batch([piece.text for piece in parcel]), strict=True):
            yield piece, [*ids, tokenizer.end_of_text] if piece.last else ids

    for whole in pieces:
        texts = list(tokenizer.parts(whole.text))
        for number, text in enumerate(texts, 1):
            parcel.append(Piece(text, whole.last and number == len(texts)))
            size += len(text)
            if size >= PARCEL or len(parcel) == MOST_PIECES:
                yield from encode()
                parcel, size = [], 0
    yield from encode()


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index of a folder, or None if its ids are missing or incomplete, by their size."""
    index = read_json(folder / INDEX)
    if index is None:
        return None
    try:
        if (folder / IDS).stat().st_size == index["tokens"] * np.dtype(index["dtype"]).itemsize:
            return index
    except (OSError, KeyError, TypeError):
        pass
    log.warning("The cached tokens in %s are not those that were written there; they are made again.", folder)
    return None


def open_ids(folder: Path, tokens: int, dtype: str) -> np.ndarray:
    """Return the ids of a folder as one array [N], mapped and not read."""
    if not tokens:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(folder / IDS, dtype=dtype, mode="r", shape=(tokens,)))
