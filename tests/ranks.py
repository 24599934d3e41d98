"""Ranks on this machine, each a process of its own that has its imports done already, for tests of several."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import lightning
import torch
from small import GEOMETRY, SHALLOW, build
from torch import Tensor
from torch.utils.data import DataLoader

from gsm import checkpoint
from gsm.training.distributed.sharded import Sharded, undivided
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW

STEPS, ROWS, LENGTH = 10, 4, 20


def start(processes: Any, world: int, function: Callable[..., None], *arguments: Any) -> list[Any]:
    """As many processes that call ``function``, started as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        environment = {name: str(value) for name, value in {**names, **places}.items()}
        started.append(processes.Process(target=_be, args=(environment, function, arguments)))
        started[-1].start()
    return started


def together(processes: Any, world: int, function: Callable[..., None], *arguments: Any) -> list[int]:
    """The same, waited for; their exit codes."""
    started = start(processes, world, function, *arguments)
    for process in started:
        process.join()
    return [process.exitcode for process in started]


def _be(environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    function(*arguments)


def batches(world: int = 1, rank: int = 0, steps: int = STEPS, rows: int = ROWS) -> list[dict[str, Tensor]]:
    """A rank's share of the same steps; the numbers of targets and of padding differ from row to row."""
    made = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids_BT = torch.randint(GEOMETRY.vocabulary, (rows, LENGTH + 1), generator=generator)
        targets_BT, documents_BT = ids_BT[:, 1:].clone(), torch.zeros_like(ids_BT[:, 1:])
        for row in range(rows):
            documents_BT[row, LENGTH - row :] = -1
            targets_BT[row, : 3 * row] = targets_BT[row, LENGTH - row :] = -100
        whole = {"tokens": ids_BT[:, :-1], "targets": targets_BT, "documents": documents_BT}
        share = rows // world
        made.append({name: value[rank * share : (rank + 1) * share] for name, value in whole.items()})
    return made


class Gradients(lightning.Callback):
    """Keeps those of the first step, whole."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: LanguageModeling, *_: Any) -> None:
        """Looks at them."""
        if not self.first:
            kept = {name: p.grad for name, p in pl_module.model.named_parameters() if p.grad is not None}
            self.first = {name: undivided(gradient).clone() for name, gradient in kept.items()}


def task_of(case: str, dtype: torch.dtype = torch.float64, **options: Any) -> LanguageModeling:
    """The task of a small model, which is built with these options."""
    model = build(case, geometry=SHALLOW, **options).to(dtype).train()
    return LanguageModeling(model, AdamW(3e-3, 2, 0.1, 0.1), config={"model": {}}, measures_accuracy=True)


def trainer_of(strategy: str, steps: int, *callbacks: lightning.Callback, **given: Any) -> lightning.Trainer:
    """One that only trains, on as many ranks as there are; what is given is for ``Sharded``."""
    return lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=Sharded(**given) if strategy == "fsdp" else strategy,
        max_steps=steps,
        gradient_clip_val=1.0,
        log_every_n_steps=steps,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )


def slowly(*given: Any, whole: Any = checkpoint.complete) -> None:
    """A step that takes its time to be completed."""
    time.sleep(0.5)
    whole(*given)


def trained(
    case: str,
    strategy: str,
    folder: Any,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    save: bool = False,
    given: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Trains a small model and leaves its weights, first gradients and last loss in ``<folder>/<strategy>.pt``."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    context = (given or {}).get("context", 1)
    task, gradients = task_of(case, dtype, **options), Gradients()
    trainer = trainer_of(strategy, steps, gradients, **(given or {}))
    trainer.fit(task, DataLoader(batches(world // context, rank // context, steps), batch_size=None))
    if save:
        with patch.object(checkpoint, "complete", slowly):
            trainer.save_checkpoint(folder / "saved", weights_only=False)
            trainer.strategy.teardown()
        assert (folder / "saved" / checkpoint.STATE).is_file(), "a rank that ends now kills the one that writes"
    weights = {name: undivided(value) for name, value in task.model.state_dict().items()}
    if rank == 0:
        found = {
            "loss": trainer.callback_metrics["train/loss"],
            "norm": trainer.callback_metrics["train/gradient_norm"],
        }
        found = {name: float(value) for name, value in found.items()}
        torch.save({"weights": weights, "gradients": gradients.first, **found}, folder / f"{strategy}.pt")
