"""One line with the state of training: rewritten in place on a terminal, printed once an interval in any case."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning

from gsm.training.resume import ends_interval

CLEAR_LINE = "\r\x1b[2K"
TIMED = 20  # steps that are timed before the time left is shown
TRAINING = {
    "train/loss": "loss {:.3f}",
    "val/bits_per_byte": "val bits/byte {:.3f}",
    "train/tokens_per_second": "{:,.0f} tokens/s",
}
VALIDATION = {
    "val/loss": "loss {:.4g}",
    "val/perplexity": "perplexity {:.4g}",
    "val/bits_per_byte": "bits/byte {:.4g}",
    "val/accuracy": "accuracy {:.4g}",
}


class Progress(lightning.Callback):
    """Print a line at the end of every logging interval, with the metrics that the loggers get then, and one after
    every validation. After twenty steps a line has the time left.

    On a terminal, a line with the step at hand is rewritten in place between them.
    """

    def __init__(self) -> None:
        self._leads = False  # whether this rank prints
        self._terminal = sys.stdout.isatty()
        self._start = (0, 0.0)
        self._shown = 0.0
        self._stays = False

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Note whether this rank prints."""
        self._leads = trainer.is_global_zero

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Remember where this process started, for the time left."""
        self._start = (trainer.global_step, time.perf_counter())

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Note the end of an interval; its metrics are logged after this hook."""
        self._stays = self._leads and ends_interval(trainer)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Print the line of the step that has ended."""
        if self._stays or self._may_rewrite():
            self._show(self._line(trainer), self._stays)
        self._stays = False

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Print the line of the step that has ended."""
        self.on_train_batch_start(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Print the line of the last step, if no validation has followed it."""
        self.on_train_batch_start(trainer)

    def on_validation_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, number: int, *_: Any):
        """Show the batch of the validation, on a terminal."""
        if self._may_rewrite():
            self._show(f"{_step(trainer)}: validating, batch {number + 1} of {trainer.num_val_batches[0]}")

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Print the results of the validation."""
        if self._leads and not trainer.sanity_checking:
            self._show(f"{_step(trainer)}: validation {'  '.join(_values(trainer, VALIDATION))}", stays=True)

    def _line(self, trainer: lightning.Trainer) -> str:
        """Return the line, with the numbers that are known already, within 80 columns."""
        step, steps = trainer.global_step, trainer.max_steps
        parts = [f"{_step(trainer)}/{steps}", *_values(trainer, TRAINING)]
        done, since = step - self._start[0], time.perf_counter() - self._start[1]
        if done >= TIMED and steps > step:
            parts.append(f"{clock(since / done * (steps - step))} left")
        return "  ".join(parts)

    def _may_rewrite(self) -> bool:
        """On a terminal, a few times a second: reading a loss makes a GPU wait."""
        return self._leads and self._terminal and time.perf_counter() - self._shown > 0.25

    def _show(self, line: str, stays: bool = False) -> None:
        """Write a line; the next line overwrites it unless it stays."""
        print(f"{CLEAR_LINE if self._terminal else ''}{line}", end="\n" if stays else "", flush=True)
        self._shown = time.perf_counter()


def clock(seconds: float) -> str:
    """Return seconds as ``3:07`` or ``1:02:45``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _step(trainer: lightning.Trainer) -> str:
    return f"step {trainer.global_step:>{len(str(trainer.max_steps))}}"


def _values(trainer: lightning.Trainer, formats: dict[str, str]) -> list[str]:
    """Return the metrics that there are, in words."""
    metrics = trainer.callback_metrics
    return [form.format(metrics[name]) for name, form in formats.items() if name in metrics]
