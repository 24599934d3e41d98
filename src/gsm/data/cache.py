"""Files that are made once and found again: where they lie, how they are written, how damage is noticed.

A file is written beside its place and moved there in one step, so that a reader never sees half of it and two
processes that make the same file at once only do the work twice. A note next to it holds its checksum.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gsm.paths import ROOT

log = logging.getLogger(__name__)


def cache_folder(chosen: str | os.PathLike[str] | None = None) -> Path:
    """`chosen`, else the environment's GSM_CACHE, else `.cache/gsm` in the repository (or, without one, at home).

    Raises:
        OSError: the folder cannot be made; the sentence says how to choose another.
    """
    home = ROOT if (ROOT / "pyproject.toml").is_file() else Path.home()
    folder = Path(chosen or os.environ.get("GSM_CACHE") or home / ".cache" / "gsm")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the cache folder {str(folder)!r} cannot be made ({error.strerror}); "
            "set data.cache_dir or GSM_CACHE to a folder that can be written"
        ) from error
    return folder


def find_or_make(path: Path, make: Callable[[BinaryIO], dict[str, Any]]) -> dict[str, Any]:
    """Leaves a sound file at `path`, made by `make(file)` if there is none, and returns what `make` noted about it.

    `make` writes into the open file and returns a note that JSON can hold.
    """
    note = _read_note(path)
    if note is not None:
        return note
    with _replacing(path) as file:
        note = make(file)
        file.flush()
        entry = {"note": note, "checksum": _checksum(Path(file.name))}
    with _replacing(_note_path(path)) as file:
        file.write(json.dumps(entry, indent=1).encode())
    return note


def _read_note(path: Path) -> dict[str, Any] | None:
    """What was noted about a sound file; None if there is no file or it is damaged, which is logged."""
    if not (path.exists() and _note_path(path).exists()):
        return None
    try:
        entry = json.loads(_note_path(path).read_text())
        if entry["checksum"] == _checksum(path):
            return entry["note"]
        damage = "its checksum has changed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage = f"its note cannot be read: {error!r}"
    log.warning("The cached file %s is damaged (%s) and is made again.", path, damage)
    return None


def _note_path(path: Path) -> Path:
    return path.with_name(path.name + ".note.json")


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`, moved into its place when it is complete and removed when it is not."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("xb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
