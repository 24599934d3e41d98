"""Make one file of a checkpoint: of one in parts, to move it, or of its weights alone, to keep or to hand on.

python -m gsm.experiments.consolidate checkpoint=logs/... output=whole.ckpt
python -m gsm.experiments.consolidate checkpoint=logs/default/gsm/seed0 output=small.ckpt weights=bfloat16
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsm.config import command_line
from gsm.config.check import ConfigError
from gsm.config.load import checkpoint_file, read_checkpoint
from gsm.files import save_whole
from gsm.training.distributed import shards

WEIGHTS = ("", "bfloat16", "float16", "float32")
# Entries that build a model, its tokenizer and its data again, and that results name.
KEPT = ("format", "global_step", "tokenizer", "fingerprint", "started_from")
SETTINGS = ("model", "data", "recipe", "size", "trainer", "global_batch", "name", "arm", "seed", "choices", "ngrams")


def consolidate(checkpoint: str, output: str, weights: str = "") -> Path:
    """Write a whole checkpoint into one file; or with ``weights``, only the parts that the use of the model needs.

    generate, evaluate and compare read checkpoints in parts as they are; this is for moving one elsewhere.

    Args:
        checkpoint: a .ckpt file, or the folder of a run, which stands for its checkpoints/last.ckpt.
        output: the file to write; an existing file is replaced.
        weights: bfloat16, float16 or float32: the weights alone, in this type, with the configuration and the
            tokenizer. Such a file is used and started from, not resumed. Left out: everything, as it is.

    Raises:
        FileNotFoundError, CheckpointError: as ``load_model`` does.
        ConfigError: the output is the checkpoint itself, or weights of another type.
        OSError: it cannot be written.
    """
    path, target = checkpoint_file(checkpoint), Path(output)
    if target.resolve() == path.resolve():
        raise ConfigError(f"output is {output}, the checkpoint itself: choose another file")
    if weights not in WEIGHTS:
        raise ConfigError(f"weights is '{weights}', but has to be {', '.join(WEIGHTS[1:])}, or left out")
    content = shards.whole(read_checkpoint(path, mmap=True, verify=True), path)
    save_whole(weights_alone(content, getattr(torch, weights)) if weights else content, target)
    print(f"Written to {target}", flush=True)
    return target


def weights_alone(checkpoint: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the weights in a type, the configuration without the places of its run, and the tokenizer."""
    seen: dict[int, Tensor] = {}  # a head that is the embedding is kept once

    def lowered(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        return seen.setdefault(x.data_ptr(), x.to(dtype).clone())

    config = checkpoint["hyper_parameters"]["config"]
    return {
        "state_dict": {name: lowered(x) for name, x in checkpoint["state_dict"].items()},
        "hyper_parameters": {"config": {key: config[key] for key in SETTINGS if key in config}},
        **{key: checkpoint[key] for key in KEPT if key in checkpoint},
    }


if __name__ == "__main__":
    command_line.call(consolidate, "-m gsm.experiments.consolidate")
