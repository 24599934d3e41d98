"""A long row of token ids in files of bounded size, mapped and not read; written in order, and gone on with.

    <folder>/00000.bin   ids, nothing else          <folder>/00000.json   what is known where this shard ends
    <folder>/00001.bin                              <folder>/00001.json
    <folder>/index.json  appears last: everything together

All shards but the last hold the same number of ids, wherever documents end. A shard appears when it is complete, its
note after it. What an interruption leaves is a number of full shards, and the note of the last says from which document
and which of its ids to go on.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gsm.data.cache import checksum, read_json, writable, write_json
from gsm.files import replacing

log = logging.getLogger(__name__)
SHARD = 1 << 26  # ids: 128 MiB of uint16
ALWAYS_CHECKED = 1 << 28  # bytes: the shards of a split up to this size have their checksums verified at every start


@dataclass(frozen=True)
class Progress:
    """What stands before some place in the row of ids.

    Attributes:
        tokens: ids before it, ends of text included.
        pieces: pieces of documents that end before it.
        inside: ids of the next piece that come before it.
        bytes: UTF-8 bytes of the text before it.
        spelled: bytes that the ids before it stand for; other than `bytes` with a tokenizer that loses or adds some.
    """

    tokens: int = 0
    pieces: int = 0
    inside: int = 0
    bytes: int = 0
    spelled: int = 0


@dataclass(frozen=True)
class Encoded:
    """Some pieces of documents as ids.

    Attributes:
        ids: uint16 or uint32 [N], those of all pieces.
        ends_P: int64 [P]: where each piece ends in `ids`.
        bytes_P: int64 [P]: UTF-8 bytes of each piece's text.
    """

    ids: np.ndarray
    ends_P: np.ndarray
    bytes_P: np.ndarray


class ShardedIds:
    """The ids of one folder as one row.

    Args:
        folder: where the shards lie.
        tokens: how many ids there are.
        shard: how many lie in each file but the last.
        dtype: of the ids.
    """

    def __init__(self, folder: Path, tokens: int, shard: int, dtype: str) -> None:
        self._folder, self._tokens, self._shard, self.dtype = folder, tokens, shard, np.dtype(dtype)
        self._open: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, places: slice) -> np.ndarray:
        """The ids of a range without a stride; a copy only where it crosses from one file into another."""
        start, stop, _ = places.indices(self._tokens)
        first, last = start // self._shard, max(start, stop - 1) // self._shard
        if first == last:
            return self._file(first)[start - first * self._shard : stop - first * self._shard]
        inner = range(first * self._shard, (last + 1) * self._shard, self._shard)
        return np.concatenate(
            [self._file(at // self._shard)[max(start - at, 0) : min(stop - at, self._shard)] for at in inner]
        )

    def _file(self, number: int) -> np.ndarray:
        if number not in self._open:
            if not self._tokens:
                return np.empty(0, self.dtype)
            self._open[number] = np.memmap(shard_path(self._folder, number), dtype=self.dtype, mode="r")
        return self._open[number]


class ShardWriter:
    """Puts ids into shards, from the place where the folder's sound shards end.

    Args:
        folder: where they go; made if need be.
        lengths_V: int64 [V], bytes that each id stands for.
        dtype: of the ids.
        shard: ids in a file.
        limit: ids altogether; None: all that come.

    Attributes:
        done: what lies in the folder.
    """

    def __init__(
        self, folder: Path, *, lengths_V: np.ndarray, dtype: str, shard: int = SHARD, limit: int | None = None
    ) -> None:
        self.folder, self.lengths_V, self.dtype, self.shard, self.limit = folder, lengths_V, dtype, shard, limit
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.done = self._resume()
        self._drop_after(self.done.tokens // shard)
        self._inside = self.done.inside
        self._stack, self._file, self._checksum = ExitStack(), None, 0

    @property
    def full(self) -> bool:
        """Whether `limit` is reached."""
        return self.limit is not None and self.done.tokens >= self.limit

    def write(self, encoded: Encoded) -> None:
        """Appends ids. The first call after `done.pieces` pieces begins with the next of them, whole."""
        at, begun = self._inside, self.done
        self._inside = 0
        while at < len(encoded.ids) and not self.full:
            room = self.shard - self.done.tokens % self.shard
            stop = at + min(room, len(encoded.ids) - at, self._left(len(encoded.ids)))
            self._append(encoded.ids[at:stop])
            self.done = self._after(encoded, begun, stop, self.lengths_V[encoded.ids[at:stop]].sum())
            at = stop
            if self.done.tokens % self.shard == 0:
                self._close()

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Completes the last shard, writes the index, with more facts if there are any, and returns it."""
        self._close()
        notes = [read_json(note_path(self.folder, n)) or {} for n in range(-(-self.done.tokens // self.shard))]
        index = {**asdict(self.done), "dtype": self.dtype, "shard": self.shard, "shards": notes, **facts}
        write_json(self.folder / "index.json", index)
        return index

    def abandon(self) -> None:
        """Leaves the complete shards for the next time, and of the others nothing."""
        with suppress(_Abandoned), self._stack:
            raise _Abandoned

    def _left(self, most: int) -> int:
        return most if self.limit is None else self.limit - self.done.tokens

    def _after(self, encoded: Encoded, begun: Progress, stop: int, spelled: int) -> Progress:
        """The progress where the first `stop` ids of `encoded`, the first of which came after `begun`, are written."""
        whole = int(np.searchsorted(encoded.ends_P, stop, side="right"))
        end = int(encoded.ends_P[whole - 1]) if whole else 0
        tokens = begun.tokens - begun.inside + stop
        text = begun.bytes - self._share(encoded, 0, begun.inside) + int(encoded.bytes_P[:whole].sum())
        inside = stop - end
        partly = self._share(encoded, whole, inside)
        return Progress(tokens, begun.pieces + whole, inside, text + partly, self.done.spelled + int(spelled))

    def _share(self, encoded: Encoded, piece: int, inside: int) -> int:
        """Bytes of the text that the first `inside` ids of a piece stand for."""
        if not inside:
            return 0
        start = int(encoded.ends_P[piece - 1]) if piece else 0
        spelled = self.lengths_V[encoded.ids[start : int(encoded.ends_P[piece])]]
        return round(int(encoded.bytes_P[piece]) * float(spelled[:inside].sum() / max(1, spelled.sum())))

    # Files

    def _append(self, ids: np.ndarray) -> None:
        with writable(self.folder):
            if self._file is None:
                self._file = self._begin()
            raw = np.ascontiguousarray(ids).tobytes()
            self._file.write(raw)
            self._checksum = zlib.crc32(raw, self._checksum)

    def _begin(self) -> BinaryIO:
        self._checksum = 0
        return self._stack.enter_context(replacing(shard_path(self.folder, self.done.tokens // self.shard)))

    def _close(self) -> None:
        """Makes the shard that is being written appear, and its note."""
        if self._file is None:
            return
        with writable(self.folder):
            self._stack.close()
        self._file = None
        number = (self.done.tokens - 1) // self.shard
        state = shard_path(self.folder, number).stat()
        note = {**asdict(self.done), "checksum": self._checksum, "size": state.st_size, "changed": state.st_mtime_ns}
        write_json(note_path(self.folder, number), note)

    def _resume(self) -> Progress:
        """Where the last of the full shards that are sound, counted from the first, ends."""
        done = Progress()
        for number in range(len(list(self.folder.glob("*.bin")))):
            note = read_json(note_path(self.folder, number)) or {}
            complete = note.get("tokens") == (number + 1) * self.shard
            verify = (number + 1) * self.shard * np.dtype(self.dtype).itemsize <= ALWAYS_CHECKED
            if not complete or damage(self.folder, number, note, verify):
                break
            done = Progress(**{field.name: note[field.name] for field in fields(Progress)})
        if done.tokens:
            log.info("Going on after %d tokens that lie in %s already.", done.tokens, self.folder)
        return done

    def _drop_after(self, number: int) -> None:
        (self.folder / "index.json").unlink(missing_ok=True)
        for path in list(self.folder.glob("[0-9]*.*")):
            if path.stem.isdigit() and int(path.stem) >= number:
                path.unlink()


class _Abandoned(Exception):
    pass


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a folder whose shards are all there and sound; else None, with a warning that names the damage."""
    path = folder / "index.json"
    if not path.exists():
        return None
    index = read_json(path)
    try:
        harm = next(_harm(folder, index), None) if index else f"{path} is not what was written"
    except (KeyError, TypeError, AttributeError) as error:
        harm = f"{path} cannot be read: {error!r}"
    if harm is None:
        return index
    log.warning("The cached tokens in %s are damaged (%s); what is damaged is made again.", folder, harm)
    return None


def damage(folder: Path, number: int, note: dict[str, Any], verify: bool) -> str | None:
    """What is wrong with a shard: its size, or its contents, which are read if `verify` or if its time has changed."""
    path = shard_path(folder, number)
    if not path.exists():
        return f"{path.name} is missing"
    state = path.stat()
    if state.st_size != note["size"]:
        return f"{path.name} has {state.st_size} bytes and should have {note['size']}"
    if (verify or state.st_mtime_ns != note["changed"]) and checksum(path) != note["checksum"]:
        return f"{path.name} has changed: its checksum is another"
    return None


def shard_path(folder: Path, number: int) -> Path:
    """The file of one shard."""
    return folder / f"{number:05d}.bin"


def note_path(folder: Path, number: int) -> Path:
    """The note beside it."""
    return folder / f"{number:05d}.json"


def _harm(folder: Path, index: dict[str, Any]) -> Iterator[str]:
    verify = index["tokens"] * np.dtype(index["dtype"]).itemsize <= ALWAYS_CHECKED
    for number in range(-(-index["tokens"] // index["shard"])):
        if harm := damage(folder, number, index["shards"][number], verify):
            yield harm
