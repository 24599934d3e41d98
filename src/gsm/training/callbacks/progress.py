"""One line with the state of training: rewritten in place on a terminal, printed now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning

from gsm.errors import within
from gsm.training.callbacks import find
from gsm.training.callbacks.throughput import Throughput
from gsm.training.resume import ends_step

CLEAR_LINE = "\r\x1b[2K"
TIMED = 20  # steps that are timed before the time left is shown


class Progress(lightning.Callback):
    """Print loss, validation bits per byte, tokens per second and, after twenty steps, the time left.

    Args:
        every: steps between two lines that stay; on a terminal the line in between is rewritten at each step.
    """

    def __init__(self, every: int = 10) -> None:
        within(1, every=every)
        self.every = every
        self._terminal = sys.stdout.isatty()
        self._start = (0, 0.0)
        self._shown = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Remember where this process started, for the time left."""
        self._start = (trainer.global_step, time.perf_counter())

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print the line of a finished step."""
        step = trainer.global_step
        stays = ends_step(trainer) and (step % self.every == 0 or step == trainer.max_steps)
        if trainer.is_global_zero and (stays or self._may_rewrite()):
            self._show(self._line(trainer, float(outputs.get("cross_entropy", outputs["loss"]))), stays)

    def on_validation_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Show the batch of the validation, on a terminal."""
        if trainer.is_global_zero and self._terminal:
            batches = trainer.num_val_batches[0]
            self._show(f"step {trainer.global_step}: validating, batch {batch_idx + 1} of {batches}", stays=False)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Print the results of the validation."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            values = [f"{name} {metrics[key]:.4g}" for name, key in VALIDATION if key in metrics]
            step = f"step {trainer.global_step:>{len(str(trainer.max_steps))}}"
            self._show(f"{step}: validation {'  '.join(values)}", stays=True)

    def _line(self, trainer: lightning.Trainer, loss: float) -> str:
        """Return the line, with the numbers that are known already, within 80 columns."""
        steps = trainer.max_steps
        parts = [f"step {trainer.global_step:>{len(str(steps))}}/{steps}", f"loss {loss:.3f}"]
        bits = trainer.callback_metrics.get("val/bits_per_byte")
        if bits is not None:
            parts.append(f"val bits/byte {bits:.3f}")
        speed = next((callback.latest for callback in find(trainer, Throughput) if callback.latest), None)
        if speed:
            parts.append(f"{speed:,.0f} tokens/s")
        done, since = trainer.global_step - self._start[0], time.perf_counter() - self._start[1]
        if done >= TIMED and steps > trainer.global_step:
            parts.append(f"{clock(since / done * (steps - trainer.global_step))} left")
        return "  ".join(parts)

    def _may_rewrite(self) -> bool:
        """On a terminal, a few times a second: reading a loss makes a GPU wait."""
        return self._terminal and time.perf_counter() - self._shown > 0.25

    def _show(self, line: str, stays: bool) -> None:
        """Write a line; the next line overwrites it unless it stays."""
        sys.stdout.write((CLEAR_LINE if self._terminal else "") + line + ("\n" if stays else ""))
        sys.stdout.flush()
        self._shown = time.perf_counter()


VALIDATION = (
    ("loss", "val/loss"),
    ("perplexity", "val/perplexity"),
    ("bits/byte", "val/bits_per_byte"),
    ("accuracy", "val/accuracy"),
)


def clock(seconds: float) -> str:
    """Return seconds as ``3:07`` or ``1:02:45``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
