"""The few names inside the project that cases need. Whoever builds its parts anew adapts this file alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import gsm.experiments.experiment  # noqa: F401 - what train.py imports late: whoever is forked from here has it
from gsm.config.command_line import REMEDIES
from gsm.config.compose import compose
from gsm.config.load import read_checkpoint
from gsm.data import shards
from gsm.experiments.estimate import refuse_endless
from gsm.experiments.fit import assemble, open_data, train
from gsm.experiments.folder import prepare
from gsm.training.callbacks.summary import commit, versions

__all__ = [
    "REMEDIES",
    "build",
    "commit",
    "compose",
    "ids",
    "open_data",
    "prepare",
    "resumed",
    "small_shards",
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


def small_shards() -> None:
    """Has text encoded into files so small that there are many: a kill then leaves some that are whole."""
    shards.SHARD = 1 << 16
