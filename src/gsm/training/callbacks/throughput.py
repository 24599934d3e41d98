"""Tokens per second of training alone, and the peak of memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning
import torch
from torch import Tensor

from gsm.training.distributed.ranks import sharing
from gsm.training.resume import ends_interval


class Throughput(lightning.Callback):
    """Logs ``train/tokens_per_second`` over each logging interval, validation left out, and ``train/peak_memory_gib``;
    there and at every validation also ``train/tokens``, the number that the run has trained on until then.

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
        """Count the batch; at the end of an interval, logs."""
        self.tokens += batch["tokens"].numel() * sharing(trainer)[0]
        if ends_interval(trainer):
            self._read_clock()
            tokens, seconds = self.tokens - self._interval[0], self.seconds - self._interval[1]
            self._interval = (self.tokens, self.seconds)
            self.latest = tokens / seconds
            memory = peak_memory_bytes(self._device) / 2**30
            measured = {"train/tokens_per_second": self.latest, "train/peak_memory_gib": memory}
            pl_module.log_dict({"train/tokens": self._total(), **measured})

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Stop the clock."""
        if not ends_interval(trainer):  # the end of an interval has logged it
            pl_module.log("train/tokens", self._total())
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

    def _total(self) -> Tensor:
        return torch.tensor(float(self.tokens), dtype=torch.float64)  # float32 is exact to 17 million only

    def _read_clock(self) -> None:
        """Add the time since the last reading; on a GPU, after its queue has run dry."""
        if self._clock is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak so far, in bytes: allocations of PyTorch on a GPU, else the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
