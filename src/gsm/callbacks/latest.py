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

    ``ModelCheckpoint(save_last=True)`` does not do: it writes ``last.ckpt`` only where it also found a new best one.

    Args:
        path: of the file; replaced as a whole, so that it is never half written.
        minutes: how much training an interruption may cost.
    """

    def __init__(self, path: str | os.PathLike[str], minutes: float = 2.0) -> None:
        if minutes <= 0:
            raise ValueError(f"callbacks.latest.minutes is {minutes}, but has to be above 0")
        self.path, self.minutes = Path(path), minutes
        self._saved = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Starts counting minutes."""
        self._saved = time.monotonic()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: LanguageModeling, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves when it is time to, at the end of a step."""
        late = trainer.strategy.broadcast(time.monotonic() - self._saved > self.minutes * 60)  # ranks save together
        if pl_module.step_ends() and (late or trainer.global_step == trainer.max_steps):
            self._save(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Saves; comes after ``ModelCheckpoint`` has judged, so that its verdict is saved too."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def _save(self, trainer: lightning.Trainer) -> None:
        partial = self.path.with_name(f".{self.path.name}.partial")
        trainer.save_checkpoint(partial, weights_only=False)
        if trainer.is_global_zero:
            os.replace(partial, self.path)
        self._saved = time.monotonic()
