"""Atomic writes of files, and reads of files that are not trusted.

A written file is complete or missing, even if the process or the machine stops.
"""

from __future__ import annotations

import errno
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

BLOCK = 1 << 22  # bytes per read
LARGEST = 1 << 27  # largest file that is read at once, in bytes
DIRECTORY = 0x10  # ZIP directory flag; PyTorch reads an entry with this flag as zeros, so it is rejected
NUMBER, NONE = (int, float, type(None)), type(None)
SHAPES: dict[str, Any] = {  # required structure of files that several commands read; see `misshapen`
    "summary.json": {
        **dict.fromkeys(["status", "reason", "run", "curves"], (str, NONE)),
        **dict.fromkeys(["steps", "tokens", "train_seconds"], NUMBER),
        **dict.fromkeys(["choices", "versions", "kernels"], ({...: (str, NONE)}, NONE)),
        "fingerprint": ({...: (str, int)}, NONE),
        "data": (Mapping, NONE),
        "runs": ({...: Mapping}, NONE),
        "metrics": ({...: (*NUMBER, [[NUMBER]])}, NONE),  # the lists are sums by document
        "by_length": ({...: {...: NUMBER}}, NONE),
        "by_load": ({...: {...: NUMBER}}, NONE),
    },
    "experiment.json": {"arms": {...: [str]}, "table": [str], "overrides": [str], "tuned": {...: Mapping}},
}
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


def save_whole(content: Any, path: str | os.PathLike[str]) -> None:
    """Save with ``torch.save``, atomically. Raises OSError.

    The content is serialised in memory first, because PyTorch's writer hides the reason for an error of the disk.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_whole(path, buffer.getbuffer())


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
    """Read the object in a JSON file. Raises OSError, ValueError or RecursionError for a damaged file.

    The object must have the structure that `SHAPES` defines for the file's name, and numbers and strings that a JSON
    writer can produce.
    """
    text = read_text(path)
    value = json.loads(text, parse_int=_whole_number)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # fails for a lone surrogate, which no terminal can show
    wrong = next(misshapen(value, SHAPES.get(Path(path).name, Mapping)), None)
    if wrong:
        raise ValueError(wrong)
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def misshapen(value: Any, shape: Any, place: str = "") -> Iterator[str]:
    """Yield a description of every difference between a value and its required shape.

    Args:
        value: plain containers.
        shape: a type; a tuple of alternatives; a dict with the shape of each key (``...`` for all other keys); a list
            with the shape of its elements.
        place: name of the value in the descriptions.
    """
    shapes = shape if isinstance(shape, tuple) else (shape,)
    kinds = tuple(Mapping if isinstance(kind, dict) else list if isinstance(kind, list) else kind for kind in shapes)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        yield f"{place or 'its content'} is {value!r:.40}"
    for kind in shapes:
        if isinstance(kind, list) and isinstance(value, list):
            for number, element in enumerate(value):
                yield from misshapen(element, kind[0], f"{place}[{number}]")
        if isinstance(kind, dict) and isinstance(value, Mapping):
            for key, element in value.items():
                below = kind.get(key, kind.get(...))
                if below is not None:
                    yield from misshapen(element, below, f"{place}.{key}" if place else str(key))


class Damaged(ValueError):
    """A file is damaged; the message names the part."""


def verify_archive(file: BinaryIO | str | os.PathLike[str], tensors: bool = True) -> None:
    """Verify the checksums in a file that `torch.save` wrote; PyTorch does not verify them.

    Args:
        file: its path, or a file to read from.
        tensors: whether to verify the bytes of tensors too, and not only their descriptions.

    Raises:
        Damaged: the checksum of a part is wrong, or it is no such file.
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
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError, zlib.error) as error:
        raise Damaged(str(error) or type(error).__name__) from error


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
