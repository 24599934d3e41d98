"""The steps that a run keeps (``gsm.checkpoint``): the last one, from which it goes on, and the best one.

Lightning's ``ModelCheckpoint`` saves in ``on_train_batch_end``, before the metrics of that step are logged, and if
the writing rank meets a disk error, all other ranks wait forever. A user's own ``ModelCheckpoint`` works beside these
callbacks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from gsm import checkpoint as checkpoints
from gsm.errors import ConfigError
from gsm.training.distributed import ranks
from gsm.training.distributed.sharded import Sharded
from gsm.training.resume import ends_interval

# Whether a metric of validation should be low or high.
MODES = {"val/loss": "min", "val/perplexity": "min", "val/bits_per_byte": "min", "val/accuracy": "max"}


class Latest(Checkpoint):
    """The last step, from which an interrupted run goes on.

    Saved at the end of a logging interval, where nothing is pending (``gsm.training.resume``), if there was a
    validation since the last save or ``minutes`` have passed; and after the last step. An interruption loses the
    training since the last save: at most ``minutes`` and one logging interval.

    Args:
        folder: of the run.
        minutes: how much training an interruption may cost.
        share: largest share of the time that saving may take; a slow save is done less often than every ``minutes``.

    Attributes:
        saved: the last step that this process has saved or resumed from; None before.
        settled: whether an exact resume is possible from this point between two batches.
    """

    def __init__(self, folder: str | os.PathLike[str], minutes: float = 2.0, share: float = 0.05) -> None:
        for name, value in (("minutes", minutes), ("share", share)):
            if value <= 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        self.folder, self.minutes, self.share = Path(folder), minutes, share
        self.saved: int | None = None
        self.settled = True
        self._validated = False  # since the last save
        self._since = 0.0
        self._took = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start counting minutes."""
        self._since = time.monotonic()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Note whether a logging interval ends; its metrics are logged after this hook."""
        self.settled = ends_interval(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save, after ``Best`` has, so that its state is saved too."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated = True
            if self.settled:
                self.save(trainer)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Save if nothing is pending and it is time to; the first hook after metrics are logged."""
        if self.settled and self.saved != trainer.global_step:
            wait = max(self.minutes * 60, self._took / self.share)
            due = self._validated or time.monotonic() - self._since > wait
            if trainer.strategy.broadcast(due):  # ranks save together
                self.save(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save the last step where no validation followed it; after it nothing is pending."""
        self.settled = True
        self.save(trainer)

    def on_save_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note whether an exact resume is possible from this checkpoint."""
        checkpoint["settled"] = self.settled

    def save(self, trainer: lightning.Trainer) -> None:
        """Save, unless this step is saved already or no step was taken."""
        if trainer.global_step in (0, self.saved):
            return
        start = time.monotonic()
        save(trainer, self.folder)
        self._since, self.saved, self._validated = time.monotonic(), trainer.global_step, False
        self._took = self._since - start


class Best(Checkpoint):
    """The best step: saved after a validation that is better than all before it, of this run and its earlier parts.

    Args:
        folder: of the run.
        monitor: the metric to judge by.
        mode: whether it should be low or high: min, max; None: that of ``MODES``.

    Attributes:
        step: the best one; None before the first.
    """

    def __init__(self, folder: str | os.PathLike[str], monitor: str = "val/loss", mode: str | None = None) -> None:
        mode = mode or MODES.get(monitor)
        if mode not in ("min", "max"):
            raise ConfigError(
                f"mode must be min or max for monitor={monitor}, got {mode}; {', '.join(MODES)} need none"
            )
        self.folder, self.monitor, self.mode = Path(folder), monitor, mode
        self.step: int | None = None
        self.lowest = math.inf  # of the metric, or of its negative

    @property
    def state_key(self) -> str:
        """A key of its own for each metric: the best of one is not compared with the values of another."""
        return f"Best({self.monitor}, {self.mode})"

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save a new best model. Raises ConfigError if validation does not log the monitored metric."""
        if trainer.sanity_checking:
            return
        if self.monitor not in trainer.callback_metrics:
            measures = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
            raise ConfigError(f"callbacks.best.monitor must be one of {', '.join(measures)}, got {self.monitor}")
        value = float(trainer.callback_metrics[self.monitor]) * (1 if self.mode == "min" else -1)
        if value < self.lowest:
            self.lowest, self.step = value, trainer.global_step
            save(trainer, self.folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far and its step."""
        return {"lowest": self.lowest, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value and its step, unless that step is missing in the folder: then any model is better."""
        if checkpoints.step_folder(self.folder / "checkpoints", state_dict["step"] or 0).is_dir():
            self.lowest, self.step = state_dict["lowest"], state_dict["step"]


class Folders(CheckpointIO):
    """Lightning's checkpoints as folders (``gsm.checkpoint``), on one device and with DDP."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None):
        """Write a folder. Raises OSError."""
        if storage_options is not None:
            raise TypeError(f"storage_options must be None for a checkpoint on a local disk, got {storage_options!r}")
        checkpoints.write(Path(path), checkpoint)

    def load_checkpoint(self, path: str | os.PathLike[str], *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a folder, onto the CPU. Raises CheckpointError."""
        return checkpoints.read(Path(path))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a folder."""
        checkpoints.remove(Path(path))


def save(trainer: lightning.Trainer, run: Path) -> None:
    """Flush all loggers, save this step of a run unless it is there, then remove all steps but the last and the best.

    If a rank fails, for example by an OSError, all ranks raise: the others would wait for it until a launcher ends
    them.
    """
    folder = checkpoints.step_folder(run / "checkpoints", trainer.global_step)

    def flush() -> None:
        for logger in trainer.loggers:
            logger.save()

    def write() -> None:
        try:
            trainer.save_checkpoint(folder, weights_only=False)
        except Exception:  # whatever it is, the others wait for this rank at the end of `save_checkpoint`
            trainer.strategy.barrier()
            raise

    _all_or_none(trainer, flush)
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    latest = [part for part in callbacks if isinstance(part, Latest)]
    settled = all(part.settled for part in latest)
    there = checkpoints.read_state(folder) if trainer.is_global_zero else None
    if trainer.strategy.broadcast(there is not None and there.get("settled", True) == settled):
        return
    if isinstance(trainer.strategy, Sharded):
        trainer.save_checkpoint(folder, weights_only=False)
    else:
        _all_or_none(trainer, write)
    if trainer.is_global_zero:
        kept = {trainer.global_step, *(part.step for part in callbacks if isinstance(part, Best))}
        checkpoints.sweep(run, kept if settled else {*kept, *(part.saved for part in latest)})


def _all_or_none(trainer: lightning.Trainer, action: Callable[[], None]) -> None:
    """Call ``action`` on all ranks; an error of the leading rank is raised on all of them."""
    refused = None
    try:
        action()
    except Exception as error:
        refused = ranks.portable(error)
    refused = trainer.strategy.broadcast(refused)
    if refused is not None:
        raise refused
