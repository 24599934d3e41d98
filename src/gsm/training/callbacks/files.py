"""Checkpoints that are there as a whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from gsm.files import replacing
from gsm.training.distributed import ranks, shards
from gsm.training.distributed.sharded import Sharded


class WholeFiles(TorchCheckpointIO):
    """Writes the checkpoints of a trainer with ``replacing``, and reads them.

    Lightning's own way goes through the system's temporary folder. Where that is another disk, the last step is a copy,
    which can be cut off; and a process that is killed leaves its gigabytes there.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None):
        """Makes the whole file in memory first: PyTorch's writer hides why a disk refuses. Raises OSError."""
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}, but a checkpoint on a local disk takes none")
        save_whole(checkpoint, path)

    def load_checkpoint(self, path: str | os.PathLike[str], *arguments: Any, **options: Any) -> dict[str, Any]:
        """Also one that several ranks have written in parts."""
        return shards.whole(super().load_checkpoint(str(path), *arguments, **options), Path(path))


def save(trainer: lightning.Trainer, path: Path) -> None:
    """``trainer.save_checkpoint``. What the one rank that writes cannot do, all ranks raise, such as OSError.

    Those that wait for it would otherwise do so until a launcher ends them. Before it, what loggers have written is
    made safe. Ranks that write their shares agree on those by themselves.
    """
    refused = None
    try:
        for logger in trainer.loggers:
            logger.save()
    except OSError as error:
        refused = error
    refused = trainer.strategy.broadcast(refused)
    if refused is not None:
        raise refused
    if isinstance(trainer.strategy, Sharded):
        return trainer.save_checkpoint(path, weights_only=False)
    try:
        trainer.save_checkpoint(path, weights_only=False)
    except Exception as error:  # whatever it is, the others wait for it
        refused = ranks.portable(error)
        trainer.strategy.barrier()  # the one that the others wait in, at the end of save_checkpoint
    refused = trainer.strategy.broadcast(refused)
    if refused is not None:
        raise refused


def save_whole(content: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save`` through ``replacing``. Raises OSError."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with replacing(path) as file:
        file.write(buffer.getbuffer())
