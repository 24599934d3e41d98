"""Atomic writes of files, and reads of files that may be damaged.

A written file is complete or missing, even if the process or the machine stops.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 1 << 22  # bytes per read
LARGEST = 1 << 27  # largest file that is read at once, in bytes
DAMAGED = "{} is damaged ({}). Delete it, and run the command that wrote it again"
PARTIAL = ".{}.partial"  # temporary name while writing; `{}` is the file's name and a unique suffix


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file for bytes, which replaces `path` once all of them are on the disk.

    Several processes may do so at once: the last one to finish wins, and no reader sees a mixture.

    Raises:
        OSError: it cannot be written; the error names `path`, and the previous file is untouched.
    """
    path = Path(path)
    partial = path.with_name(PARTIAL.format(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the renaming: after a power cut the name must not belong to an empty file
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):
            partial.unlink()  # exists only after an error; a full disk needs the room


def write_whole(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    """Write a file, atomically. Raises OSError."""
    with replacing(path) as file:
        file.write(content)


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write an object as JSON, atomically. Raises OSError."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a file of UTF-8 as text, without a byte order mark.

    Raises:
        OSError: it cannot be read, or is larger than `LARGEST`.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open(path, "rb") as file:
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST:,} bytes", str(path))
    return raw.decode("utf-8-sig")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the object in a small JSON file; None if it is missing or damaged (see `damage`)."""
    try:
        return sound(path)
    except (OSError, ValueError, RecursionError):
        return None


def damage(path: str | os.PathLike[str]) -> str:
    """Return a sentence about the damage of a JSON file; empty if it is sound or missing."""
    try:
        sound(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        why = str(error)
    else:
        return ""
    return DAMAGED.format(path, f"{why:.200}")


def sound(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the object in a JSON file. Raises OSError, ValueError or RecursionError for a damaged file."""
    value = json.loads(read_text(path))
    if not isinstance(value, dict):
        raise ValueError(f"its content must be an object, got {value!r:.40}")
    return value


def sweep(*folders: Path) -> None:
    """Remove temporary files that killed processes left in these folders."""
    for folder in folders:
        for partial in folder.glob(PARTIAL.format("*")):
            partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Write the folder's entries to the disk; network file systems that cannot do so are ignored."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
