"""The cache: files that are made once. Where they lie, and how several processes share them.

A process that needs a file waits for the process that makes it, where the disk has locks.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gsm.files import read_json, write_json
from gsm.paths import ROOT, at_home, in_clone

log = logging.getLogger(__name__)


def cache_folder(chosen: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the cache, which is made if it is missing.

    It is `chosen`, or the environment's GSM_CACHE, or `.cache/gsm` in the repository if that can be written, or `gsm`
    in the user's cache: XDG_CACHE_HOME or `~/.cache`.

    Raises:
        OSError: the folder cannot be made; the message names the two settings that choose another.
    """
    folder = Path(at_home(str(chosen or os.environ.get("GSM_CACHE") or _own_folder())))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the cache folder {str(folder)!r} cannot be made ({error.strerror}); "
            "set data.cache_dir or GSM_CACHE to a folder that can be written"
        ) from error
    return folder


def _own_folder() -> Path:
    """Return the folder of the clone if it can be written, else the user's."""
    folder = ROOT / ".cache" / "gsm"
    if in_clone():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gsm"


def file_digest(path: Path, notes: Path | None) -> str:
    """Return the SHA-256 of a file's contents, in hexadecimal.

    The folder `notes` caches it until the file changes, by its size, inode and ctime: unlike the time that `ls` shows,
    the ctime is not preserved by `cp -p` and `rsync -t`.
    """
    state = path.stat()
    facts = {"path": str(path.resolve()), "size": state.st_size, "inode": state.st_ino, "changed": state.st_ctime_ns}
    note = notes and notes / f"digest-{hashlib.sha256(facts['path'].encode()).hexdigest()[:20]}.json"
    older = (read_json(note) if note else None) or {}
    if facts.items() <= older.items() and "sha256" in older:
        return older["sha256"]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if note:
        with suppress(OSError):  # a cache that can only be read may still hold everything else
            write_json(note, {**facts, "sha256": digest})
    return digest


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`; wait for a process that has it. Then look whether that process has made the file.

    Some network file systems have no locks: work may be done twice there.

    Raises:
        OSError: the folder cannot be written.
    """
    with writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f".{path.name}.lock").open("wb")
    with file:
        _take_lock(file, path)
        yield


def _take_lock(file: BinaryIO, path: Path) -> None:
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Waiting for another process, which makes %s.", path)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        log.debug("No lock for %s: %s", path, error)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn an OSError of writing into one that names the folder and the two settings that choose another."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"the cache folder {str(folder)!r} cannot be written ({error.strerror or error}); "
            "set data.cache_dir or GSM_CACHE to a folder that can be, on a disk with room"
        ) from error
