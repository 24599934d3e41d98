"""``last.ckpt``: where training stands, so that it can go on after an interruption."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint

from gsm.training.callbacks.files import save
from gsm.training.module import LanguageModeling


class Latest(Checkpoint):
    """Keeps one checkpoint of the last step: saved at validations, every few minutes, and before the last validation.

    It is written between two steps only, when all metrics of the step that ended are written too. A batch's own end is
    too early for that. ``ModelCheckpoint(save_last=True)`` does not do either: it writes ``last.ckpt`` only where it
    also found a new best one.

    Args:
        path: of the file.
        minutes: how much training an interruption may cost.
        share: of the time, how much saving may take: what takes long is done less often than ``minutes`` say.

    Attributes:
        saved: the step of the last save of this process, None before it.
    """

    def __init__(self, path: str | os.PathLike[str], minutes: float = 2.0, share: float = 0.05) -> None:
        if minutes <= 0:
            raise ValueError(f"callbacks.latest.minutes is {minutes}, but has to be above 0")
        if share <= 0:
            raise ValueError(f"callbacks.latest.share is {share}, but has to be above 0")
        self.path, self.minutes, self.share = Path(path), minutes, share
        self.saved: int | None = None
        self._since = 0.0
        self._took = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Starts counting minutes."""
        self._since = time.monotonic()

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: LanguageModeling, batch: Any, batch_idx: int
    ) -> None:
        """Saves when it is time to, before the first batch of a step."""
        wait = max(self.minutes * 60, self._took / self.share)
        late = trainer.strategy.broadcast(time.monotonic() - self._since > wait)  # ranks save together
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
        if self.saved != trainer.global_step:
            self.save(trainer, pl_module)

    def save(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Saves a state that is sound, once the metrics up to it are on the disk. A run without a step has none."""
        pl_module.stop_if_broken()
        if trainer.global_step == 0:
            return
        start = time.monotonic()
        save(trainer, self.path)
        self._since, self.saved = time.monotonic(), trainer.global_step
        self._took = self._since - start
