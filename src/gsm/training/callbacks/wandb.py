"""Runs in Weights & Biases (extra ``wandb``), offline unless one wants otherwise."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from gsm import paths
from gsm.training.callbacks.boards import Known


class WandB(WandbLogger):
    """Lightning's logger, with the pictures of a run, and with one name for a run however often it is resumed.

    Nothing is sent before ``wandb sync <run>/wandb/offline-run-*``, or with ``offline=False``. Offline, each part of a
    run that was resumed is a folder of its own with the same id: ``wandb sync --append``, in their order. What was
    logged between the last checkpoint and an interruption is there twice, at the same ``trainer/global_step`` with the
    same values: W&B takes nothing back.

    Args:
        folder: of the run; W&B's own folder is made in it.
        experiment, arm, seed: project, group and name there.
        offline: write files alone.
        options: of Lightning's logger.

    Raises:
        ImportError: the library is missing; the message says how to install it.
    """

    def __init__(self, folder: str, experiment: str, arm: str, seed: int, offline: bool = True, **options: Any) -> None:
        named = {"project": experiment, "group": arm, "name": f"{arm}-seed{seed}"}
        try:
            import wandb
        except ImportError as error:
            raise ImportError(f"logger=wandb needs Weights & Biases: {paths.install('wandb')}") from error
        settings = wandb.Settings(silent=True, console="off")
        self.known = Known(folder, "wandb")
        known = {"id": self.known.read() or uuid.uuid4().hex[:12], "settings": settings}
        known |= {} if offline else {"resume": "allow"}
        super().__init__(save_dir=folder, offline=offline, **{**named, **known, **options})

    @property
    def experiment(self) -> Any:
        """W&B's run; begun when it is first asked for, when one that this process has still open ends."""
        import wandb

        if self._experiment is None and wandb.run is not None:
            wandb.finish()  # or its numbers would go there
        run = super().experiment
        if isinstance(known := getattr(run, "id", None), str):
            self.known.note(known)
        return run

    def show_image(self, name: str, pixels_YXC: np.ndarray, step: int) -> None:
        """A picture, uint8."""
        self.log_image(name, [pixels_YXC], step)

    def show_histogram(self, name: str, value_N: Tensor, step: int) -> None:
        """How numbers are distributed."""
        import wandb

        shown = wandb.Histogram(value_N.detach().float().cpu().tolist())
        self.experiment.log({name: shown, "trainer/global_step": step})
