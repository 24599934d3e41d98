"""Where training stands when a step has ended: what it takes, beside weights and optimiser, to go on bit for bit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Standing:
    """Taken at the end of a step, stored whenever a checkpoint is: batches that were accumulated since are repeated.

    Everything in it is a plain container or a tensor, as ``torch.load(..., weights_only=True)`` wants it.

    Attributes:
        step: optimiser steps that are done.
        batches: batches that are done; with accumulated gradients several make a step.
        random: states of the random number generators, of ``random_states``; of several ranks, those of the one that
            leads, which all ranks get when they go on.
        means: what the means of the logging interval have added up so far: float [2], the sum and its weight. Of this
            rank; in a checkpoint, of all together.
        validation_due: the step is to be validated before training goes on.
        logged: metrics of this step that loggers were given already.
        world: ranks that share the data. What they have consumed is batches x world x batch size, which stays a whole
            number of steps where the sequences of a step are divided otherwise (``divided``).
    """

    step: int
    batches: int
    random: Mapping[str, Any]
    means: Mapping[str, Tensor]
    validation_due: bool = False
    logged: Mapping[str, float] | None = None
    world: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """As plain containers and tensors on the CPU."""
        means = {name: pair.cpu() for name, pair in self.means.items()}
        return {**asdict(self), "means": means, "logged": dict(self.logged or {})}

    def divided(self, batches: int) -> Standing:
        """The same where so many batches make up a step: a checkpoint stands at the end of one."""
        return replace(self, batches=self.step * batches)

    def straighten(self, fit_loop: dict[str, Any]) -> None:
        """Makes the trainer's own counters in a checkpoint say the same, as of a pass over the data about to begin.

        Otherwise Lightning guesses from them inside of which hook the checkpoint was written, and what it then leaves
        out or does twice depends on that. The order of the data does not restart with a pass, so a new one is free.
        """
        batches = fit_loop["epoch_loop.batch_progress"]
        batches["total"] = dict.fromkeys(batches["total"], self.batches)
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
        passes = fit_loop["epoch_progress"]
        passes["total"] = dict.fromkeys(passes["total"], passes["total"]["completed"])
        passes["current"] = dict.fromkeys(passes["current"], passes["current"]["completed"])
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = self.step


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators that code in this process draws from by default. Does not make a GPU wait."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states["numpy"] = [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """The opposite; a checkpoint of another kind of device says nothing of this one's generator."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
