"""``best.ckpt``: the checkpoint with the lowest validation loss so far."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint

from gsm.errors import ConfigError
from gsm.training.callbacks.files import save
from gsm.training.module import LanguageModeling


class Best(Checkpoint):
    """Saves where a validation finds less than all before it; what they found goes on with a resumed run.

    Args:
        path: of the file.
        monitor: the metric to be low.
    """

    def __init__(self, path: str | os.PathLike[str], monitor: str = "val/loss") -> None:
        if not monitor.startswith("val/"):
            raise ValueError(
                f"callbacks.best.monitor is '{monitor}', but has to be what validations find: val/loss, ..."
            )
        self.path, self.monitor = Path(path), monitor
        self.lowest = math.inf

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Judges; also where a run that was cut off in its very last validation makes up for it on its own.

        Raises ConfigError where validations do not find what is monitored: there would never be a checkpoint.
        """
        if trainer.sanity_checking:
            return
        if self.monitor not in trainer.callback_metrics:
            known = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
            raise ConfigError(
                f"callbacks.best.monitor is '{self.monitor}', but validations find {', '.join(known)}: say one of them"
            )
        found = float(trainer.callback_metrics[self.monitor])
        if found < self.lowest:
            self.lowest = found
            save(trainer, self.path)

    def state_dict(self) -> dict[str, Any]:
        """The verdict so far."""
        return {"lowest": self.lowest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint; in a folder without the file that the verdict is about, it starts anew."""
        self.lowest = state_dict["lowest"] if self.path.is_file() else math.inf
