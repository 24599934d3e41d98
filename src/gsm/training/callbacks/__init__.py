"""Callbacks of training: checkpoints, throughput, progress, pictures, the run's summary."""

from __future__ import annotations

from typing import TypeVar

import lightning

Kind = TypeVar("Kind")


def find(trainer: lightning.Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the callbacks of a trainer that are of this type."""
    callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue] # which Lightning does not declare
    return [callback for callback in callbacks if isinstance(callback, kind)]
