"""Find the first step with a loss or gradient that is not finite, and its batch.

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

from gsm.files import save_whole
from gsm.training.distributed.ranks import sharing

NONE = -1


@dataclass(frozen=True)
class NotFinite:
    """A step with a loss or gradient that is not finite.

    Attributes:
        what: "loss" or "gradient norm".
        step: optimiser steps before it.
        first, last: the batches in question, counted from 0 over the whole run.
        batch: their content, int64 [B,T] each; several batches one below the other.
    """

    what: str
    step: int
    first: int
    last: int
    batch: dict[str, Tensor]


class NonFiniteGuard:
    """Sees every loss and the gradients of every step of a Lightning module.

    On a CPU it refuses at once, before the optimiser's step. On a GPU, where looking would make the GPU wait, it notes
    the values and looks at them when ``check`` is called: at the end of a logging interval, before a validation and
    before a checkpoint. At every step ``torch.where`` chooses the batch to keep, so that the batch of the first broken
    step can still be shown many steps later.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._batches: list[Mapping[str, Tensor]] = []
        self._noted_4: Tensor | None = None  # step, last batch, how many batches, which of them (-1: the gradient)
        self._kept: dict[str, Tensor] = {}

    def see_loss(self, module: lightning.LightningModule, loss: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Note the loss of a batch. Raises FloatingPointError."""
        self._losses.append(loss.detach())
        self._batches.append(batch)
        alone = module.trainer.world_size == 1  # several ranks have to stop at the same place: at their gradients
        if alone and loss.device.type == "cpu" and not bool(loss.detach().isfinite()):
            number = module.trainer.fit_loop.total_batch_idx
            refuse(NotFinite("loss", module.global_step, number, number, dict(batch)), module.trainer)

    def see_gradients(self, module: lightning.LightningModule, norms: Sequence[Tensor]) -> None:
        """Note the norms of a step's gradients, which end the step. Raises FloatingPointError."""
        self.note(norms, module.trainer.fit_loop.total_batch_idx, module.global_step)
        if module.device.type == "cpu":
            self.check(module)

    def check(self, module: lightning.LightningModule) -> None:
        """Raises FloatingPointError if the loss or the gradient of a step so far was not finite."""
        broken = self.found()
        if broken:
            refuse(broken, module.trainer)

    def note(self, norms: Sequence[Tensor], number: int, step: int) -> None:
        """Note the norms of a step's gradients, after its last batch ``number``, without waiting for a GPU."""
        losses_A, batches = torch.stack(self._losses), self._batches
        self._losses, self._batches = [], []
        batch = {name: torch.cat([part[name] for part in batches]) for name in batches[0]}
        if self._noted_4 is None:
            self._noted_4, self._kept = torch.full((4,), NONE, device=losses_A.device), batch
        broken_A = ~losses_A.isfinite()
        bad_norm = ~torch.stack([norm.isfinite() for norm in norms]).all() if norms else broken_A.new_zeros(())
        which = torch.where(broken_A.any(), broken_A.int().argmax(), NONE)
        now_4 = torch.stack([torch.full_like(which, value) for value in (step, number, len(batches))] + [which])
        first = (broken_A.any() | bad_norm) & (self._noted_4[0] == NONE)
        self._noted_4 = torch.where(first, now_4, self._noted_4)
        if all(self._kept[name].shape == value.shape for name, value in batch.items()):
            self._kept = {name: torch.where(first, value, self._kept[name]) for name, value in batch.items()}
        elif bool(first) or self.found() is None:  # another shape: only a look at the values can compare them
            self._kept = batch

    def found(self) -> NotFinite | None:
        """The first broken step of all that have ended; makes a GPU wait."""
        if self._noted_4 is None:
            return None
        step, number, count, which = self._noted_4.tolist()
        if step == NONE:
            return None
        if which == NONE:
            return NotFinite("gradient norm", step, number - count + 1, number, self._kept)
        parts = {name: value.chunk(count)[which] for name, value in self._kept.items()}
        place = number - count + 1 + which
        return NotFinite("loss", step, place, place, parts)


def refuse(broken: NotFinite, trainer: lightning.Trainer) -> NoReturn:
    """Write the batch to ``broken_batch.pt`` in the run's folder and raise FloatingPointError, which names the file.

    Several ranks come here together, and all raise the sentence of the rank with the loss.
    """
    speaker = 0
    if trainer.world_size > 1:
        sources: list[str] = [""] * trainer.world_size
        torch.distributed.all_gather_object(sources, broken.what)
        speaker = sources.index("loss") if "loss" in sources else 0
    sentence = _written(broken, trainer) if trainer.global_rank == speaker else ""
    raise FloatingPointError(trainer.strategy.broadcast(sentence, src=speaker))


def _written(broken: NotFinite, trainer: lightning.Trainer) -> str:
    """Write the batch; return a sentence with the places of its sequences in the order of the data.

    Their numbers come with it if the data have an ``order``. With several ranks, it is the rank's share of each batch.
    """
    size = len(next(iter(broken.batch.values()))) // (broken.last - broken.first + 1)
    batches = range(broken.first, broken.last + 1)
    world, rank = sharing(trainer)
    firsts = [(number * world + rank) * size for number in batches]
    order = getattr(trainer.datamodule, "order", None)  # pyright: ignore[reportAttributeAccessIssue]
    numbers = [int(i) for first in firsts for i in order.indices(first, first + size)] if order is not None else []
    places = [firsts[0], firsts[-1] + size - 1]
    facts: dict[str, Any] = {"batches": [broken.first, broken.last], "places": places, "sequences": numbers}
    path = Path(trainer.default_root_dir) / "broken_batch.pt"
    content = {name: value.cpu() for name, value in broken.batch.items()}
    try:
        save_whole({"what": broken.what, "step": broken.step, **facts, **content}, path)
        written = f"which is kept in {path}"
    except OSError as error:
        written = f"which could not be written ({error})"
    shown = ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
    sequences = f" (sequences {shown})" if shown else ""
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return (
        f"the {broken.what} of step {broken.step} is not finite, on places {places[0]} to {places[1]} of the data order"
        f"{sequences}, {written}; checkpoints are of earlier steps: lower optimizer.learning_rate (it was at "
        f"{rate:g}), lengthen optimizer.warmup_steps, or use trainer.precision=32-true"
    )
