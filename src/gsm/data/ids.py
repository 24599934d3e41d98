"""Write token ids to one file, and map it.

    <folder>/ids.bin      the ids and nothing else
    <folder>/index.json   counts of the whole file; appears last

Text and tokenizer determine every byte of ids.bin. So two processes may write it at once, where a disk has no locks:
they write the same bytes to the same places, and neither shortens the file before it is complete. Ids without an index
are written again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gsm.data.cache import writable
from gsm.files import read_json, write_json

log = logging.getLogger(__name__)
IDS, INDEX = "ids.bin", "index.json"


@dataclass(frozen=True)
class Encoded:
    """The ids of some pieces of documents.

    Attributes:
        ids: uint16 or uint32 [N], those of all pieces.
        ends_P: int64 [P]: where each piece ends in `ids`.
        bytes_P: int64 [P]: UTF-8 bytes of each piece's text.
    """

    ids: np.ndarray
    ends_P: np.ndarray
    bytes_P: np.ndarray


def write_ids(
    folder: Path,
    parcels: Iterable[Encoded],
    *,
    lengths_V: np.ndarray,
    dtype: str,
    limit: int | None = None,
    report: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    """Write ids and their index, and return the index.

    Args:
        folder: made if it is missing.
        parcels: the ids, in order.
        lengths_V: int64 [V], bytes that each id stands for.
        dtype: of the ids in the file.
        limit: most ids in the file; None: no limit.
        report: takes the number of ids of each parcel once they are written.

    Returns:
        ``tokens``: ids, ends of text included; ``bytes``: UTF-8 bytes of the text; ``spelled``: bytes that the ids
        stand for, another number where a tokenizer loses or adds bytes; ``dtype``.

    Raises:
        OSError: the folder cannot be written.
    """
    tokens = text = spelled = 0
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
        (folder / IDS).touch()
        file = (folder / IDS).open("r+b")
    with file:
        for encoded in parcels:
            count = len(encoded.ids) if limit is None else min(len(encoded.ids), limit - tokens)
            with writable(folder):
                file.write(np.ascontiguousarray(encoded.ids[:count], dtype).tobytes())
            tokens += count
            text += _text_bytes(encoded, count, lengths_V)
            spelled += int(lengths_V[encoded.ids[:count]].sum())
            report(count)
            if tokens == limit:
                break
        index = {"tokens": tokens, "bytes": text, "spelled": spelled, "dtype": np.dtype(dtype).name}
        with writable(folder):
            file.truncate(tokens * np.dtype(dtype).itemsize)  # another limit never shares the folder
            file.flush()
            os.fsync(file.fileno())
            write_json(folder / INDEX, index)
    return index


def _text_bytes(encoded: Encoded, count: int, lengths_V: np.ndarray) -> int:
    """Return the bytes of the text of the first `count` ids. A piece that is cut has its share of the bytes."""
    whole = int(np.searchsorted(encoded.ends_P, count, side="right"))
    text, start = int(encoded.bytes_P[:whole].sum()), int(encoded.ends_P[whole - 1]) if whole else 0
    if count == start:
        return text
    spelled = lengths_V[encoded.ids[start : int(encoded.ends_P[whole])]]
    return text + round(int(encoded.bytes_P[whole]) * float(spelled[: count - start].sum() / max(1, spelled.sum())))


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
