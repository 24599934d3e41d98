"""The few names inside the project that cases need. Whoever builds its parts anew adapts this file alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gsm.callbacks.summary import commit, versions
from gsm.runs.command_line import REMEDIES
from gsm.runs.compose import compose
from gsm.runs.estimate import refuse_endless
from gsm.runs.fit import assemble, open_data, train
from gsm.runs.folder import prepare
from gsm.runs.load import read_checkpoint

__all__ = [
    "REMEDIES",
    "build",
    "commit",
    "compose",
    "ids",
    "left",
    "open_data",
    "prepare",
    "resumed",
    "train",
    "versions",
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


def ids(config: Mapping[str, Any]) -> list[torch.Tensor]:
    """Every sequence of both splits, in order."""
    data = open_data(config)
    splits = (data.train_set, data.validation_set)
    return [split[number]["tokens"].clone() for split in splits for number in range(len(split))]


def left(folder: Path) -> list[str]:
    """What a run that ended may not leave in its folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.partial"))
