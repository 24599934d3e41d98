"""The few names inside the project that cases need. Whoever builds its parts anew adapts this file alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import gsm
import gsm.experiments.experiment  # noqa: F401 - what train.py imports late: whoever is forked from here has it
from gsm.config.command_line import REMEDIES, errors_as_sentences
from gsm.config.compose import compose
from gsm.config.load import read_checkpoint
from gsm.data import shards
from gsm.experiments.estimate import refuse_endless
from gsm.experiments.fit import assemble, open_data, train
from gsm.experiments.folder import prepare
from gsm.training.callbacks.summary import commit, versions
from gsm.training.distributed import shards as parts

__all__ = [
    "REMEDIES",
    "build",
    "commit",
    "compose",
    "errors_as_sentences",
    "ids",
    "in_parts",
    "open_data",
    "prepare",
    "resumed",
    "small_shards",
    "train",
    "versions",
    "whole",
]


def build(config: Mapping[str, Any]) -> None:
    """All that a run is made of, up to its first step."""
    refuse_endless(config)
    assemble(config, prepare(config))


def resumed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint that a run goes on from, as it takes it up; what cannot be taken up is refused."""
    start = prepare(config)
    assemble(config, start)
    assert start.checkpoint is not None, "it starts over without a word"
    return read_checkpoint(start.checkpoint)


def in_parts(checkpoint: Mapping[str, Any], written: Path, path: Path, files: bool) -> None:
    """The checkpoint as several ranks would have written it; ``files``: a file of each tensor.

    Args:
        checkpoint: an ordinary one.
        written: its file.
        path: of the small file that stands for the parts.
        files: whether each tensor has a file of its own.
    """
    model = gsm.load_model(written)
    names = {id(parameter): f"model.{name}" for name, parameter in model.named_parameters()}
    ordered = [names[id(parameter)] for group in model.parameter_groups().values() for parameter in group]
    tensors, rest = parts.take_apart(checkpoint, ordered)
    folder = path.parent / parts.FOLDER / "00000006-parts"
    writer = parts.Writer(folder, single_file_per_rank=not files, thread_count=1)
    metadata = dcp.save(tensors, storage_writer=writer, no_dist=True)
    torch.save({**rest, parts.FOLDER: parts.described(metadata, folder, ordered)}, path)


def whole(path: Path) -> dict[str, Any]:
    """What a checkpoint in parts stands for."""
    return parts.whole(torch.load(path, weights_only=True), path)


def ids(config: Mapping[str, Any]) -> list[torch.Tensor]:
    """Every sequence of both splits, in order."""
    data = open_data(config)
    splits = (data.train_set, data.validation_set)
    return [split[number]["tokens"].clone() for split in splits for number in range(len(split))]


def small_shards() -> None:
    """Has text encoded into files so small that there are many: a kill then leaves some that are whole."""
    shards.SHARD = 1 << 16


def first_row(memory: Any) -> int:
    """The first token for which a memory can still give rows; what those before it would need was not computed."""
    return memory.ledger.first_row
