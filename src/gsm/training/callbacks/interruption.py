"""SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C: training ends at the next batch, in a state that it can go on from."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import lightning
import torch

from gsm.signals import SIGNALS
from gsm.training.callbacks.latest import Latest
from gsm.training.callbacks.throughput import callbacks
from gsm.training.module import LanguageModeling

SAME = 0.5  # seconds: a signal to a process and to its group arrives twice


class Interrupted(SystemExit):
    """Raised at the batch after the signal; ends a process with the code that a shell shows for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


class Interruption(lightning.Callback):
    """Asks for signals while training runs. A second one ends the process at once, as it would have without this.

    A handler for SIGUSR1 or SIGUSR2 that somebody else put there before, such as submitit's, stays: it restarts the
    job.

    Attributes:
        signal: the number of the first signal, None as long as there was none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self._foreign: set[signal.Signals] = set()

    def setup(self, trainer: lightning.Trainer, pl_module: LanguageModeling, stage: str) -> None:
        """Looks who handles them, before Lightning puts handlers of its own; it restores all of them in the end."""
        warnings = (signal.SIGUSR1, signal.SIGUSR2)
        self._foreign = {number for number in warnings if callable(signal.getsignal(number))}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Asks for the signals, where Python allows it."""
        if threading.current_thread() is threading.main_thread():
            for number in set(SIGNALS) - self._foreign:
                signal.signal(number, self._remember)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: LanguageModeling, batch: Any, batch_idx: int
    ) -> None:
        """Ends training between two batches."""
        self._stop(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: lightning.Trainer, pl_module: LanguageModeling, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Ends a validation that has begun; it is made up for later."""
        if trainer.state.fn == "fit":
            self._stop(trainer, pl_module)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Ends a run that has just finished training before its conclusions."""
        self._stop(trainer, pl_module)

    def _stop(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Saves and raises if there was a signal on any rank: a machine that is taken away need not be the first."""
        number = self._of_all(trainer.world_size)
        if number is None:
            return
        for callback in callbacks(trainer):
            if isinstance(callback, Latest):
                callback.save(trainer, pl_module)
        raise Interrupted(number)

    def _of_all(self, world: int) -> int | None:
        """The signal of the first rank that had one."""
        numbers = [self.signal] * world
        if world > 1:
            torch.distributed.all_gather_object(numbers, self.signal)
        return next((number for number in numbers if number is not None), None)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
