"""The few names inside the project that cases need. Whoever builds its parts anew adapts this file alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gsm.experiments.execute  # noqa: F401 - what train.py imports late: whoever is forked from here has it
from gsm.checkpoint import read
from gsm.config.command_line import errors_as_sentences
from gsm.config.compose import compose
from gsm.config.load import instantiate
from gsm.training import run
from gsm.training.callbacks.summary import Summary, commit, versions
from gsm.training.folder import Start, prepare
from gsm.training.run import Parts, build_model, open_data, train
from gsm.training.trainer import build as build_trainer

__all__ = [
    "build",
    "commit",
    "compose",
    "errors_as_sentences",
    "prepare",
    "resumed",
    "train",
    "versions",
]


def assemble(config: Mapping[str, Any], start: Start | None = None) -> Parts:
    """Build the parts of a run as `train` does, up to its first step."""
    model, optimizer = build_model(config), instantiate(config["optimizer"], "optimizer")
    summary = Summary(Path(config["folder"]) / "summary.json")
    trainer = build_trainer(config, summary)
    return run.assemble(config, start or Start(), open_data(config), model, optimizer, trainer, summary)


def build(config: Mapping[str, Any]) -> None:
    """All that a run is made of, up to its first step."""
    assemble(config, prepare(config))


def resumed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint that a run goes on from, as it takes it up; what cannot be taken up is refused."""
    start = prepare(config)
    assemble(config, start)
    assert start.checkpoint is not None, "it starts over without a word"
    return read(start.checkpoint)
