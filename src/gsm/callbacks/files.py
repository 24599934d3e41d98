"""Files that are there as a whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

PARTIAL = ".{}.partial"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes the place of ``path`` once all of them are on the disk.

    Raises:
        OSError: it cannot be written; the error names ``path``, and what was there before is untouched.
    """
    path = Path(path)
    partial = path.with_name(PARTIAL.format(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the name: after a power cut it must not stand for an empty file
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()  # a full disk needs the room
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def sweep(*folders: Path) -> None:
    """Removes what a process that was killed while it wrote has left in these folders."""
    for folder in folders:
        for partial in folder.glob(PARTIAL.format("*")):
            partial.unlink()


class WholeFiles(TorchCheckpointIO):
    """Writes the checkpoints of a trainer with ``replacing``.

    Lightning's own way goes through the system's temporary folder. Where that is another disk, the last step is a copy,
    which can be cut off; and a process that is killed leaves its gigabytes there.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None):
        """Makes the whole file in memory first: PyTorch's writer hides why a disk refuses. Raises OSError."""
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}, but a checkpoint on a local disk takes none")
        save_whole(checkpoint, path)


def save_whole(content: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save`` through ``replacing``. Raises OSError."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with replacing(path) as file:
        file.write(buffer.getbuffer())


def _sync_folder(folder: Path) -> None:
    """Makes a new name last; some network file systems cannot, and then need not be asked."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
