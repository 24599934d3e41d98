"""Training steps on several devices: Lightning's DDP around the project's own task, a process for each device."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gsm.benchmarks.room import watching
from gsm.config.compose import compose
from gsm.config.load import build_model, instantiate
from gsm.models.base import LanguageModel
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW


@dataclass(frozen=True)
class Job:
    """What is trained, and for how long: a variant of ``model`` and of ``size``, whether activations are recomputed,
    sequences on each device, tokens of a sequence, steps that are not timed and that are, and how many devices of which
    kind."""

    name: str
    size: str
    recompute: bool | str
    batch: int
    context: int
    warm_up: int
    steps: int
    kind: str
    devices: int

    def build(self) -> LanguageModel:
        """The model, the same in every process."""
        return build_model(self.name, self.size, [f"model.recompute={str(self.recompute).lower()}"], seed=0)

    def optimizer(self) -> AdamW:
        """The settings of the optimiser."""
        return instantiate(compose([f"model={self.name}", f"size={self.size}"])["optimizer"], "optimizer")


class Selection(NamedTuple):
    """Milliseconds of every timed step, and the largest peak of memory of any device, in bytes, on top of what its
    process held before there was a model (None: not known)."""

    times: list[float]
    peak: int | None


def measure(job: Job) -> Selection:
    """Trains in processes of their own. Raises ProcessRaisedException with the traceback of one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(_train, (asdict(job), port, str(path)), nprocs=job.devices)
        return Selection(**json.loads(path.read_text(encoding="utf-8")))


class RandomTokens(IterableDataset):
    """Batches of the project's form, without end; every rank draws its own."""

    def __init__(self, vocabulary: int, batch: int, context: int, seed: int) -> None:
        self.vocabulary, self.shape, self.seed = vocabulary, (batch, context + 1), seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            ids_BT = torch.randint(self.vocabulary, self.shape, generator=generator)
            tokens_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
            yield {"tokens": tokens_BT, "targets": targets_BT, "documents": torch.zeros_like(tokens_BT)}


class Clock(lightning.Callback):
    """Milliseconds of each step after the first ones, when the device has finished it.

    Attributes:
        times: of the timed steps.
    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.times, self._start = warm_up, [], 0.0

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Starts the clock."""
        self._start = _now(pl_module.device)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops it."""
        if batch_idx >= self.warm_up:
            self.times.append(_now(pl_module.device) - self._start)


def _train(rank: int, given: dict[str, Any], port: int, path: str) -> None:
    """One of the processes; the first one writes what was found."""
    job = Job(**given)
    _quiet()
    # What torchrun would say: Lightning then starts no processes itself.
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if job.kind == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.devices))
    clock, trainer = Clock(job.warm_up), _trainer(job)
    trainer.callbacks.append(clock)  # pyright: ignore[reportAttributeAccessIssue]
    with watching(torch.device(job.kind, rank)) as reached:
        task = LanguageModeling(job.build(), job.optimizer())
        tokens = RandomTokens(task.model.vocabulary, job.batch, job.context, rank)
        trainer.fit(task, DataLoader(tokens, batch_size=None))
    peak = torch.tensor(float(reached.extra or 0), dtype=torch.float64)
    peak = trainer.strategy.reduce(peak.to(trainer.strategy.root_device), reduce_op="max")
    if trainer.is_global_zero:
        Path(path).write_text(json.dumps({"times": clock.times, "peak": int(peak) or None}), encoding="utf-8")
    torch.distributed.destroy_process_group()  # a thread of its that outlives the interpreter aborts the process


def _trainer(job: Job) -> lightning.Trainer:
    """Lightning's Trainer with nothing beside the steps."""
    steps = job.warm_up + job.steps
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    return lightning.Trainer(
        accelerator=job.kind,
        devices=job.devices,
        strategy="ddp",
        precision="bf16-mixed" if job.kind == "cuda" else "32-true",
        max_steps=steps,
        gradient_clip_val=1.0,
        log_every_n_steps=steps,
        **dict.fromkeys(quiet, False),
    )


def _quiet() -> None:
    """Leaves out what Lightning tells everybody."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * time.perf_counter()
