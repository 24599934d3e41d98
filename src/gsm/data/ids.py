"""Write token ids to one file, continue after an interruption, and map the finished file.

    <folder>/ids.bin         the ids and nothing else
    <folder>/progress.json   counts up to a place in ids.bin, from which an interrupted writer continues
    <folder>/index.json      counts of the whole file; appears last

Text and tokenizer determine every byte of ids.bin. So two processes may write it at once, where a disk has no locks:
they write the same bytes to the same places, and neither shortens the file before it is complete.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gsm.data.cache import writable
from gsm.files import read_json, write_json

log = logging.getLogger(__name__)
SAVED = 1 << 24  # ids between two notes of progress: about a minute of one process
IDS, PROGRESS, INDEX = "ids.bin", "progress.json", "index.json"


@dataclass(frozen=True)
class Progress:
    """Counts of the text up to a place in the ids.

    Attributes:
        tokens: ids, ends of text included.
        pieces: pieces of documents.
        bytes: UTF-8 bytes of the text.
        spelled: bytes that the ids stand for. A tokenizer that loses or adds bytes makes them another number.
    """

    tokens: int = 0
    pieces: int = 0
    bytes: int = 0
    spelled: int = 0


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


class IdWriter:
    """Append ids to the file of a folder, from the place of its last note of progress. A context manager.

    Args:
        folder: where the file lies; made if it is missing.
        lengths_V: int64 [V], bytes that each id stands for.
        dtype: of the ids.
        limit: most ids in the file; None: no limit.

    Attributes:
        done: the counts of everything written.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, lengths_V: np.ndarray, dtype: str, limit: int | None = None) -> None:
        self.folder, self.lengths_V, self.dtype, self.limit = folder, lengths_V, np.dtype(dtype), limit
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / INDEX).unlink(missing_ok=True)
            (folder / IDS).touch()
            self._file = (folder / IDS).open("r+b")
        self.done = self._saved = self._resume()
        self._file.seek(self.done.tokens * self.dtype.itemsize)

    def __enter__(self) -> IdWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Note the progress of an interrupted writer, if the disk takes it."""
        with suppress(OSError):
            if self.done != self._saved:
                self._save()
        with suppress(OSError):
            self._file.close()

    @property
    def full(self) -> bool:
        """Whether `limit` is reached."""
        return self.limit is not None and self.done.tokens >= self.limit

    def write(self, encoded: Encoded) -> None:
        """Append ids, up to the limit. The first call continues after `done.pieces` pieces of the text."""
        count = len(encoded.ids) if self.limit is None else min(len(encoded.ids), self.limit - self.done.tokens)
        with writable(self.folder):
            self._file.write(np.ascontiguousarray(encoded.ids[:count]).tobytes())
            self.done = self._after(encoded, count)
            if self.done.tokens - self._saved.tokens >= SAVED:
                self._save()

    def finish(self) -> dict[str, Any]:
        """Write the index and return it."""
        with writable(self.folder):
            self._file.truncate(self.done.tokens * self.dtype.itemsize)  # another limit never shares the folder
            self._save()
            index = {**asdict(self.done), "dtype": self.dtype.name}
            write_json(self.folder / INDEX, index)
            (self.folder / PROGRESS).unlink(missing_ok=True)
        return index

    def _after(self, encoded: Encoded, count: int) -> Progress:
        """Return the progress after `count` of these ids. A piece that the limit cuts has its share of the bytes."""
        done, ids = self.done, encoded.ids
        whole = int(np.searchsorted(encoded.ends_P, count, side="right"))
        text = int(encoded.bytes_P[:whole].sum())
        start = int(encoded.ends_P[whole - 1]) if whole else 0
        if count > start:
            spelled = self.lengths_V[ids[start : int(encoded.ends_P[whole])]]
            text += round(int(encoded.bytes_P[whole]) * float(spelled[: count - start].sum() / max(1, spelled.sum())))
        spelled = int(self.lengths_V[ids[:count]].sum())
        return Progress(done.tokens + count, done.pieces + whole, done.bytes + text, done.spelled + spelled)

    def _save(self) -> None:
        """Note the progress once its ids are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        write_json(self.folder / PROGRESS, asdict(self.done))
        self._saved = self.done

    def _resume(self) -> Progress:
        note = read_json(self.folder / PROGRESS) or {}
        names = [field.name for field in fields(Progress)]
        if not all(type(note.get(name)) is int for name in names):
            return Progress()
        done = Progress(**{name: note[name] for name in names})
        if not 0 < done.tokens * self.dtype.itemsize <= (self.folder / IDS).stat().st_size:
            return Progress()
        log.info("Continuing after %d tokens that lie in %s.", done.tokens, self.folder)
        return done


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
