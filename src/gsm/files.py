"""Files that are there as a whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import io
import json
import os
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

BLOCK = 1 << 22  # bytes that are read at a time
DIRECTORY = 0x10  # of a part of an archive: PyTorch takes one that is marked so for empty, and gives zeros
PARTIAL = ".{}.partial"  # what a file is called while it is written; `{}` is its name and a part that no other has


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes the place of `path` once all of them are on the disk.

    Several processes may do so at once: the last one to finish wins, and no reader sees a mixture.

    Raises:
        OSError: it cannot be written; the error names `path`, and what was there before is untouched.
    """
    path = Path(path)
    partial = path.with_name(PARTIAL.format(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the name: after a power cut it must not stand for an empty file
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):
            partial.unlink()  # moved away by now, unless something went wrong; a full disk needs the room


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Writes a file as a whole or not at all. Raises OSError."""
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def save_whole(content: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save`` through `replacing`, of what is a file in memory first: PyTorch's writer hides why a disk refuses.

    Raises OSError.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with replacing(path) as file:
        file.write(buffer.getbuffer())


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The object in a small file; None if it is missing, unreadable, or holds anything else."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Damaged(ValueError):
    """A file is not what was written; the message says where."""


def verify_archive(file: BinaryIO | str | os.PathLike[str], tensors: bool = True) -> None:
    """Compares the contents of a file that `torch.save` wrote with its checksums, which PyTorch does not do itself.

    Args:
        file: its path, or a file to read from.
        tensors: also the tensors' own bytes; without, what describes them.

    Raises:
        Damaged: a part has another checksum, or it is no such file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for part in archive.infolist():
                if part.external_attr & DIRECTORY:
                    raise Damaged(f"{part.filename} is marked as a folder")
                if tensors or "/data/" not in part.filename:
                    with archive.open(part) as content:
                        while content.read(BLOCK):
                            pass
    except Damaged:
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError, zlib.error) as error:
        raise Damaged(str(error) or type(error).__name__) from error


def sweep(*folders: Path, name: str = "*") -> None:
    """Removes what a process that was killed while it wrote has left in these folders (of one file, with its name)."""
    for folder in folders:
        for partial in folder.glob(PARTIAL.format(name if name == "*" else f"{name}.*")):
            partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes a new name last; some network file systems cannot, and then need not be asked."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
