"""``profile=true``: a few steps as PyTorch's profiler saw them, for chrome://tracing, and where memory went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch.profiler import ProfilerActivity, profile

from gsm.errors import within

WIDTH = 60  # letters of an operation in the table
ROWS = 15


class Profile(lightning.Callback):
    """Write into ``folder``, on the rank that leads: ``trace.json``, for https://ui.perfetto.dev or chrome://tracing;
    ``operations.txt``, where the time went, by operation; with a GPU ``memory.pickle``, every allocation with its
    stack, for https://pytorch.org/memory_viz. Steps become slower while they are watched, by about a half on a CPU.

    Args:
        enabled: whether anything is done.
        folder: where the files go.
        after: steps of this process before the first profiled step: compiling and first allocations are over.
        steps: number of profiled steps.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(self, enabled: bool, folder: str, after: int = 5, steps: int = 3) -> None:
        within(0, after=after)
        within(1, steps=steps)
        self.enabled, self.folder, self.after, self.steps = enabled, Path(folder), after, steps
        self._watching: profile | None = None
        self._first: int | None = None

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        """Begin to watch, when it is time."""
        if not self.enabled or not trainer.is_global_zero or self._watching is not None:
            return
        self._first = trainer.global_step + self.after if self._first is None else self._first
        if trainer.global_step < self._first:
            return
        on_gpu = pl_module.device.type == "cuda"
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._watching = profile(activities=kinds, record_shapes=True, profile_memory=True)
        self._watching.__enter__()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        """End, and writes, after the last step that is watched."""
        if self._watching is not None and self._first is not None and trainer.global_step >= self._first + self.steps:
            self._end(pl_module.device)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """End the profile of a shorter run: write it, or print that there is none."""
        if self._watching is not None:
            self._end(pl_module.device)
        elif self.enabled and trainer.is_global_zero and (self._first or 0) >= trainer.global_step:
            print(f"profile: nothing to see, as training ended before step {self._first}", flush=True)

    def on_exception(self, *_: Any) -> None:
        """Stop watching, without writing the profile of a step that broke off."""
        if self._watching is not None:
            self._watching.__exit__(None, None, None)
            self._watching, self.enabled = None, False

    def _end(self, device: torch.device) -> None:
        assert self._watching is not None  # or there is nothing to end
        watched, self._watching, self.enabled = self._watching, None, False
        watched.__exit__(None, None, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        watched.export_chrome_trace(str(self.folder / "trace.json"))
        order = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        averages = watched.key_averages()
        table = averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=WIDTH)
        (self.folder / "operations.txt").write_text(table, encoding="utf-8")
        names = ["trace.json", "operations.txt"]
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            names.append("memory.pickle")
        print(f"profile: {', '.join(names)} of {self.steps} steps in {self.folder}", flush=True)
