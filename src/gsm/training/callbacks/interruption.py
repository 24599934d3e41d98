"""SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and Ctrl-C: training ends where an exact resume is possible, and is saved there."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import lightning
import torch

from gsm.signals import answered
from gsm.training.callbacks import find
from gsm.training.callbacks.checkpoints import Latest

SAME = 0.5  # seconds: a signal to a process and to its group arrives twice


class Interrupted(SystemExit):
    """End a process with the code that a shell shows for the signal.

    Attributes:
        at_once: whether this process ends where it stands, and others may not.
    """

    def __init__(self, number: int, at_once: bool = False) -> None:
        super().__init__(128 + number)
        self.at_once = at_once


class Interruption(lightning.Callback):
    """Handle signals while training runs.

    After the first signal training continues to the end of the logging interval, and of a validation that follows it,
    then saves and ends, so no step is lost. A second signal ends the run at once, where it stands,
    and a third one kills the process. A run that is ended or killed before its save goes back to its last checkpoint.

    A handler for SIGUSR1 or SIGUSR2 that somebody else put there before, such as submitit's, stays: it restarts the
    job.

    Attributes:
        signal: the number of the first signal, None as long as there was none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._notice = ""
        self._since = 0.0
        self._foreign: set[signal.Signals] = set()

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Remember the handlers of others before Lightning installs its own, which it removes at the end."""
        warnings = (signal.SIGUSR1, signal.SIGUSR2)
        self._foreign = {number for number in warnings if callable(signal.getsignal(number))}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Install the handlers, which Python allows in the main thread alone."""
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if trainer.is_global_zero and find(trainer, Latest):
            self._notice = (
                f"training goes on to the end of its logging interval, a multiple of {every} steps, is saved and ends; "
                "a second signal ends it at once"
            )
        if threading.current_thread() is threading.main_thread():
            for number in set(answered()) - self._foreign:
                signal.signal(number, self._answer)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """End training between two batches, if nothing is pending; at once where nothing would be saved."""
        if all(latest.settled for latest in find(trainer, Latest)):
            self._stop(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """End a run that has just finished training before its conclusions."""
        self._stop(trainer)

    def _stop(self, trainer: lightning.Trainer) -> None:
        """Save and raise if any rank has received a signal, not only rank 0."""
        numbers = [self.signal] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(numbers, self.signal)
        number = next((number for number in numbers if number is not None), None)
        if number is not None:
            for latest in find(trainer, Latest):
                latest.save(trainer)
            raise Interrupted(number)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
            if self._notice:
                with contextlib.suppress(RuntimeError):  # it has come in the middle of another message
                    print(f"\n{signal.Signals(number).name}: {self._notice}", file=sys.stderr, flush=True)
        elif time.monotonic() - self._since > SAME:
            signal.signal(number, signal.SIG_DFL)
            raise Interrupted(number, at_once=True)
