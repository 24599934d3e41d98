"""Exact resume: the content of a checkpoint beside weights and optimiser, and the points at which one is taken.

A checkpoint to resume from is taken only after a step that ends a logging interval, once its metrics and those of a
validation that follows are logged. At that point no mean is partly filled and no validation is due. The checkpoint also
holds the states of the random numbers; the position in the data follows from the number of steps.

This is the only file that uses undocumented parts of Lightning: the counters of its loops.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import lightning
import numpy as np
import torch

from gsm.errors import ConfigError

STATE = "training_state"  # key in a checkpoint of the state that this file adds


def ends_step(trainer: lightning.Trainer) -> bool:
    """Return whether the last batch ended an optimiser step; else it is accumulated into a later one."""
    accumulated = trainer.accumulate_grad_batches
    return (trainer.fit_loop.batch_idx + 1) % accumulated == 0 or trainer.is_last_batch


def ends_interval(trainer: lightning.Trainer) -> bool:
    """Return whether the last batch ended a step with logged metrics: every ``log_every_n_steps``th, or the last."""
    step, every = trainer.global_step, trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
    return ends_step(trainer) and (step % every == 0 or 0 < trainer.max_steps <= step)


class ResumeState(lightning.Callback):
    """Add the state for an exact resume to every checkpoint, and restore it.

    All ranks get the random numbers of the rank that writes the checkpoint: they begin with the same seed and draw the
    same numbers.

    Attributes:
        goes_on: True if the loaded checkpoint is one of this run, False if the run branches from it. A run that a
            callback had ended there ends again.
    """

    def __init__(self) -> None:
        self.goes_on = False
        self._random: Mapping[str, Any] | None = None
        self._ended = False

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the RNG states, the precision, and whether a callback has ended the run."""
        ended = trainer.should_stop and trainer.global_step < trainer.max_steps
        facts = {"precision": str(trainer.precision), "ended": ended}
        checkpoint[STATE] = {"random": random_states(pl_module.device), **facts}

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the RNG states for the start of training, and set Lightning's counters. Raises ConfigError if the
        precision has changed, as ``auto`` does with the device."""
        state, precision = checkpoint[STATE], str(trainer.precision)
        if self.goes_on and state.get("precision", precision) != precision:
            raise ConfigError(
                f"trainer.precision must be {state['precision']}, as before in this run, got {precision}; use the same "
                "kind of device, or start_from=FOLDER start_fresh=false name=NAME"
            )
        self._random, self._ended = state["random"], state.get("ended", False)
        set_counters(checkpoint["loops"]["fit_loop"], checkpoint["global_step"], trainer.accumulate_grad_batches)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Restore the RNG states, last of all: loading and setting up draw random numbers too."""
        if self.goes_on and self._ended:
            trainer.should_stop = True
        if self._random is not None:
            trainer.fit_loop.epoch_loop.restarting = False  # the counters are right; see `set_counters`
            restore_random_states(self._random, pl_module.device)
            self._random = None


def set_counters(fit_loop: dict[str, Any], step: int, accumulated: int) -> None:
    """Set Lightning's counters in a checkpoint to those of a pass over the data about to begin, after ``step`` steps.

    Lightning 2.6 (``_TrainingEpochLoop.update_restart_stage``) otherwise infers from its counters in which hook the
    checkpoint was written, and skips or repeats a batch or a validation accordingly
    (https://github.com/Lightning-AI/pytorch-lightning/issues/19367, .../pull/20379). It does not know
    ``on_train_batch_start``, which is the first hook after metrics are logged. The order of data does not restart with
    a pass, so a new one is free. Batches follow from steps, so that a resumed run may accumulate another number.
    """
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["total"] = dict.fromkeys(batches["total"], step * accumulated)
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    passes = fit_loop["epoch_progress"]
    passes["total"] = dict.fromkeys(passes["total"], passes["total"]["completed"])
    passes["current"] = dict.fromkeys(passes["current"], passes["current"]["completed"])
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step  # decides about logging


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the default random number generators of this process, as plain containers."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "python": random.getstate()}
    states["numpy"] = [str(kind), np.asarray(keys).tolist(), *rest]
    return states | ({"cuda": torch.cuda.get_rng_state(device).tolist()} if device.type == "cuda" else {})


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of ``random_states``; that of a GPU only from a checkpoint that was written on a GPU."""
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8), device)
