"""Makes one file of a checkpoint in parts: `python -m gsm.experiments.consolidate checkpoint=logs/... output=...`."""

from __future__ import annotations

from pathlib import Path

from gsm.config import command_line
from gsm.config.check import ConfigError
from gsm.config.load import checkpoint_file, read_checkpoint
from gsm.files import save_whole
from gsm.training.distributed import shards


def consolidate(checkpoint: str, output: str) -> Path:
    """Writes weights, optimiser and all else that training goes on from into one file.

    generate, evaluate and compare read checkpoints in parts as they are; this is for moving one elsewhere.

    Args:
        checkpoint: a .ckpt file, or the folder of a run, which stands for its checkpoints/last.ckpt.
        output: the file to write; what is there is replaced.

    Raises:
        FileNotFoundError, CheckpointError: as ``load_model`` does.
        ConfigError: the output is the checkpoint itself.
        OSError: it cannot be written.
    """
    path, target = checkpoint_file(checkpoint), Path(output)
    if target.resolve() == path.resolve():
        raise ConfigError(f"output is {output}, the checkpoint itself: choose another file")
    save_whole(shards.whole(read_checkpoint(path, mmap=True, verify=True), path), target)
    print(f"Written to {target}", flush=True)
    return target


if __name__ == "__main__":
    command_line.call(consolidate, "-m gsm.experiments.consolidate")
