"""Finds the first step whose loss or gradient is not finite, and the batch that it was computed from.

A batches accumulated to a step, B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import lightning
import torch
from torch import Tensor

from gsm.training.callbacks.files import save_whole

NONE = -1


@dataclass(frozen=True)
class Broken:
    """What was found.

    Attributes:
        what: "loss" or "gradient norm".
        step: steps that had been done before.
        first, last: the batches in question, counted from 0 over the whole run.
        batch: their content, int64 [B,T] each; several batches one below the other.
    """

    what: str
    step: int
    first: int
    last: int
    batch: dict[str, Tensor]


class Watch:
    """Sees every batch and every step. On a GPU it only notes what happens, there: to look makes the GPU wait.

    What it keeps of the first broken step is chosen with ``torch.where`` at every step, so that the batch can still be
    shown when somebody looks, many steps later.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._batches: list[Mapping[str, Tensor]] = []
        self._noted_4: Tensor | None = None  # step, last batch, how many batches, which of them (-1: the gradient)
        self._kept: dict[str, Tensor] = {}

    def loss(self, loss: Tensor, batch: Mapping[str, Tensor], number: int, step: int) -> Broken | None:
        """Notes the loss of batch ``number``; on a CPU, where looking is free, says at once whether it is broken."""
        self._losses.append(loss.detach())
        self._batches.append(batch)
        if loss.device.type == "cpu" and not bool(loss.detach().isfinite()):
            return Broken("loss", step, number, number, dict(batch))
        return None

    def gradients(self, norms: Sequence[Tensor], number: int, step: int) -> None:
        """Notes the norms of a step's gradients, after its last batch ``number``; ends the step."""
        losses_A, batches = torch.stack(self._losses), self._batches
        self._losses, self._batches = [], []
        batch = {name: torch.cat([one[name] for one in batches]) for name in batches[0]}
        if self._noted_4 is None:
            self._noted_4, self._kept = torch.full((4,), NONE, device=losses_A.device), batch
        broken_A = ~losses_A.isfinite()
        bad_norm = ~torch.stack([norm.isfinite() for norm in norms]).all() if norms else broken_A.new_zeros(())
        which = torch.where(broken_A.any(), broken_A.int().argmax(), NONE)
        now_4 = torch.stack([torch.full_like(which, value) for value in (step, number, len(batches))] + [which])
        first = (broken_A.any() | bad_norm) & (self._noted_4[0] == NONE)
        self._noted_4 = torch.where(first, now_4, self._noted_4)
        self._keep(first, batch)

    def found(self) -> Broken | None:
        """The first broken step of all that have ended; makes a GPU wait."""
        if self._noted_4 is None:
            return None
        step, number, count, which = self._noted_4.tolist()
        if step == NONE:
            return None
        if which == NONE:
            return Broken("gradient norm", step, number - count + 1, number, self._kept)
        parts = {name: value.chunk(count)[which] for name, value in self._kept.items()}
        place = number - count + 1 + which
        return Broken("loss", step, place, place, parts)

    def _keep(self, first: Tensor, batch: dict[str, Tensor]) -> None:
        """Keeps this batch if it is the first broken one; one of another shape can be compared only by looking."""
        if all(self._kept[name].shape == value.shape for name, value in batch.items()):
            self._kept = {name: torch.where(first, value, self._kept[name]) for name, value in batch.items()}
        elif bool(first) or self.found() is None:
            self._kept = batch


def refuse(broken: Broken, trainer: lightning.Trainer, remedy: str) -> NoReturn:
    """Writes the batch to ``broken_batch.pt`` in the run's folder and raises FloatingPointError, which says so.

    Of several ranks, which have found it together, the one whose loss it is says what they all raise.
    """
    speaker = 0
    if trainer.world_size > 1:
        found: list[str] = [""] * trainer.world_size
        torch.distributed.all_gather_object(found, broken.what)
        speaker = found.index("loss") if "loss" in found else 0
    said = _kept(broken, trainer, remedy) if trainer.global_rank == speaker else ""
    raise FloatingPointError(trainer.strategy.broadcast(said, src=speaker))


def _kept(broken: Broken, trainer: lightning.Trainer, remedy: str) -> str:
    facts = origin(broken, trainer)
    path = Path(trainer.default_root_dir) / "broken_batch.pt"
    content = {name: value.cpu() for name, value in broken.batch.items()}
    try:
        save_whole({"what": broken.what, "step": broken.step, **facts, **content}, path)
        written = f"which is kept in {path}"
    except OSError as error:
        written = f"which could not be written ({error})"
    first, last = facts["places"]
    shown = ", ".join(map(str, facts["sequences"][:16])) + (", ..." if len(facts["sequences"]) > 16 else "")
    numbers = f" (sequences {shown})" if shown else ""
    return (
        f"the {broken.what} of step {broken.step} is not finite, on places {first} to {last} of the data order"
        f"{numbers}, {written}; checkpoints are of earlier steps: {remedy}"
    )


def origin(broken: Broken, trainer: lightning.Trainer) -> dict[str, Any]:
    """Where a batch came from: its batches, the places of its sequences in the data order, and their numbers.

    Of several ranks, this rank's share of each batch; the numbers are empty if the data has no ``order`` to ask.
    """
    size = len(next(iter(broken.batch.values()))) // (broken.last - broken.first + 1)
    firsts = [
        (number * trainer.world_size + trainer.global_rank) * size for number in range(broken.first, broken.last + 1)
    ]
    order = getattr(trainer.datamodule, "order", None)  # pyright: ignore[reportAttributeAccessIssue]
    numbers = [int(i) for first in firsts for i in order.indices(first, first + size)] if order is not None else []
    return {
        "batches": [broken.first, broken.last],
        "places": [firsts[0], firsts[-1] + size - 1],
        "sequences": numbers,
    }
