"""Tokens per second of training alone, and the peak of memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning
import torch

from gsm.training.module import LanguageModeling


class Throughput(lightning.Callback):
    """Logs ``train/tokens_per_second`` over each logging interval, validation left out, and ``train/peak_memory_gib``;
    there and at every validation also ``train/tokens``, those that the run has trained on until then.

    Attributes:
        tokens: positions that this run has trained on, summed over ranks and over resumed parts.
        seconds: time that took, in seconds.
        latest: tokens per second of the last interval, None before the first has ended.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self.latest: float | None = None
        self._clock: float | None = None
        self._device = torch.device("cpu")
        self._interval = (0, 0.0)
        self._ended = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Mean over the whole run, None before the first batch has ended."""
        return self.tokens / self.seconds if self.seconds else None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Starts the clock."""
        self._device = pl_module.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._interval = (self.tokens, self.seconds)
        self._ended = self.tokens
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: LanguageModeling, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch; at the end of an interval, logs."""
        self.tokens += batch["tokens"].numel() * trainer.world_size
        self._ended = self.tokens if pl_module.step_ends() else self._ended
        if pl_module.interval_ends():
            self._read_clock()
            tokens, seconds = self.tokens - self._interval[0], self.seconds - self._interval[1]
            self._interval = (self.tokens, self.seconds)
            self.latest = speed = tokens / seconds
            memory = peak_memory_bytes(self._device) / 2**30
            measured = {"train/tokens_per_second": speed, "train/peak_memory_gib": memory}
            pl_module.report({"train/tokens": float(self._ended), **measured})

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Stops the clock."""
        pl_module.report({"train/tokens": float(self._ended)})
        self._read_clock()
        self._clock = None

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Starts the clock again."""
        self._clock = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """The totals, so that a resumed run reports the whole of itself; batches of a step cut short do not count."""
        self._read_clock()
        return {"tokens": self._ended, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]
        self._ended = self.tokens

    def _read_clock(self) -> None:
        """Adds the time since the last reading; on a GPU, after its queue has run dry."""
        if self._clock is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now


def callbacks(trainer: lightning.Trainer) -> list[lightning.Callback]:
    """The callbacks of a trainer, which Lightning does not declare."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def peak_memory_bytes(device: torch.device) -> int:
    """Peak so far, in bytes: what PyTorch has allocated on a GPU, else the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
