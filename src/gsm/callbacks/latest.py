"""``last.ckpt``: where training stands, so that it can go on after an interruption."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint

from gsm.task import LanguageModeling


class Latest(Checkpoint):
    """Keeps one checkpoint of the last step: saved at validations, every few minutes, and before the last validation.

    It is written between two steps only, when all metrics of the step that ended are written too. A batch's own end is
    too early for that. ``ModelCheckpoint(save_last=True)`` does not do either: it writes ``last.ckpt`` only where it
    also found a new best one.

    Args:
        path: of the file.
        minutes: how much training an interruption may cost.
    """

    def __init__(self, path: str | os.PathLike[str], minutes: float = 2.0) -> None:
        if minutes <= 0:
            raise ValueError(f"callbacks.latest.minutes is {minutes}, but has to be above 0")
        self.path, self.minutes = Path(path), minutes
        self._saved = 0.0
        self._step = -1

    def on_train_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Starts counting minutes."""
        self._saved = time.monotonic()

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: LanguageModeling, batch: Any, batch_idx: int
    ) -> None:
        """Saves when it is time to, before the first batch of a step."""
        late = trainer.strategy.broadcast(time.monotonic() - self._saved > self.minutes * 60)  # ranks save together
        if late and pl_module.is_between_steps():
            self.save(trainer, pl_module)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Saves before the last validation."""
        if trainer.state.fn == "fit" and trainer.global_step >= trainer.max_steps:
            self.save(trainer, pl_module)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Saves; comes after ``Best`` has judged, so that its verdict is saved too."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Saves the last step where no validation followed it."""
        if self._step != trainer.global_step:
            self.save(trainer, pl_module)

    def save(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Saves a state that is sound, once the metrics up to it are on the disk. A run without a step has none."""
        pl_module.stop_if_broken()
        if trainer.global_step == 0:
            return
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved, self._step = time.monotonic(), trainer.global_step
