"""Tokens per second of training alone, and the peak of memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning
import torch

from gsm.training.distributed.ranks import sharing
from gsm.training.resume import ends_interval


class Throughput(lightning.Callback):
    """Log speed and peak memory of every logging interval, and the number of tokens trained on so far.

    ``train/tokens_per_second`` leaves out the time of validations. ``train/tokens`` is also logged at each validation,
    ``train/peak_memory_gib`` at intervals alone.

    Attributes:
        tokens: positions that this run has trained on, summed over ranks and over resumed parts.
        seconds: duration of this training.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._clock: float | None = None  # None while it stands still
        self._device = torch.device("cpu")
        self._interval = (0, 0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """Mean over the whole run, None before the first batch has ended."""
        return self.tokens / self.seconds if self.seconds else None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start the clock."""
        self._device = pl_module.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._interval = (self.tokens, self.seconds)
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; at the end of an interval, log."""
        self.tokens += batch["tokens"].numel() * sharing(trainer)[0]
        if ends_interval(trainer):
            self._read_clock()
            (tokens, seconds), self._interval = self._interval, (self.tokens, self.seconds)
            pl_module.log("train/tokens_per_second", (self.tokens - tokens) / (self.seconds - seconds))
            pl_module.log("train/peak_memory_gib", peak_memory_bytes(self._device) / 2**30)
            self._log_tokens(pl_module)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Stop the clock."""
        if not ends_interval(trainer):  # the end of an interval has logged it
            self._log_tokens(pl_module)
        self._read_clock()
        self._clock = None

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start the clock again."""
        self._clock = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return the totals, so that a resumed run reports the whole of itself."""
        self._read_clock()
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]

    def _log_tokens(self, pl_module: lightning.LightningModule) -> None:
        # float32 is exact to 17 million only
        pl_module.log("train/tokens", torch.tensor(float(self.tokens), dtype=torch.float64))

    def _read_clock(self) -> None:
        """Add the time since the last reading; on a GPU, wait for its queued work first."""
        if self._clock is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            before, self._clock = self._clock, time.perf_counter()
            self.seconds += self._clock - before


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak so far, in bytes: allocations of PyTorch on a GPU, else the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
