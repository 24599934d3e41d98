"""TensorBoard events that a resumed run continues."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, which can go back to a step.

    Attributes:
        continues: the folder holds the events of an earlier part of this run, hyper-parameters included.
    """

    continues: bool = False

    def rewind(self, step: int) -> None:
        """Hides what was logged at ``step`` and after it; has to be called before anything is logged."""
        self.continues = any(Path(self.log_dir).glob("events.out.tfevents.*"))
        self._kwargs["purge_step"] = step
