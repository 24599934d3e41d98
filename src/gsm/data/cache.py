"""Files that are made once and found again: where they lie, how they are written, how damage is noticed.

A file is written beside its place and moved there in one step (`gsm.files`), so that a reader never sees half of it.
What is kept with it tells damage. Processes that want the same thing at once wait for the one that makes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gsm import files
from gsm.paths import ROOT, in_clone

log = logging.getLogger(__name__)
CHECKSUM = "crc32"  # the key of a small file's own, over everything else in it


def cache_folder(chosen: str | os.PathLike[str] | None = None) -> Path:
    """`chosen`, else the environment's GSM_CACHE, else `.cache/gsm` in the repository (or, without one, at home).

    Raises:
        OSError: the folder cannot be made; the sentence says how to choose another.
    """
    home = ROOT if in_clone() else Path.home()
    folder = Path(chosen or os.environ.get("GSM_CACHE") or home / ".cache" / "gsm")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the cache folder {str(folder)!r} cannot be made ({error.strerror}); "
            "set data.cache_dir or GSM_CACHE to a folder that can be written"
        ) from error
    return folder


def file_digest(path: Path, notes: Path | None) -> str:
    """SHA-256 of a file's contents, in hexadecimal.

    With a folder `notes` it is kept there and believed for as long as the file's size and time of change stay the same.
    """
    state = path.stat()
    seen = {"path": str(path.resolve()), "size": state.st_size, "changed": state.st_mtime_ns}
    note = notes and notes / f"digest-{hashlib.sha256(seen['path'].encode()).hexdigest()[:20]}.json"
    known = read_json(note) if note else None
    if known and {key: known.get(key) for key in seen} == seen and "sha256" in known:
        return known["sha256"]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if note:
        with suppress(OSError):  # a folder that is only read may still hold everything else
            write_json(note, {**seen, "sha256": digest})
    return digest


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Holds the lock that belongs to `path`, after whoever has it; what others made meanwhile has to be looked for.

    Gives whether it is held: where locks do not exist, as on some network file systems, work may be done twice.

    Raises:
        OSError: the folder cannot be written.
    """
    with writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f".{path.name}.lock").open("wb")
    with file:
        yield _take_lock(file, path)


def _take_lock(file: BinaryIO, path: Path) -> bool:
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Waiting for another process, which makes %s.", path)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        log.debug("No lock for %s: %s", path, error)
        return False
    return True


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """What fails in here because `folder` cannot be written says so, and how to choose another."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"the cache folder {str(folder)!r} cannot be written ({error.strerror or error}); "
            "set data.cache_dir or GSM_CACHE to a folder that can be, on a disk with room"
        ) from error


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def read_json(path: Path) -> dict[str, Any] | None:
    """What a small file says; None if it is missing, unreadable, or another than was written."""
    value = files.read_json(path)
    if value is None:
        return None
    kept = value.pop(CHECKSUM, None)
    return value if kept in (None, _checksum_of(value)) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a small file in one step, with its checksum; a refusal names the folder and how to choose another.

    Raises OSError."""
    with writable(path.parent):
        files.write_json(path, {**value, CHECKSUM: _checksum_of(value)})


def _checksum_of(value: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
