"""How fast models train on random tokens: whole steps, from the forward pass to the optimiser's, without Lightning.

Devices that torchrun has started train together, each with a process of its own, the whole model and its own sequences
(DDP): a step is as long as that of the slowest, and memory that of the fullest.

torchrun --nproc-per-node=8 benchmark.py benchmark=training benchmark.size=1p5b

MFU is the share of the device's arithmetic that the model's own FLOPs (``gsm.costs.model``) take, recomputed
activations left out: of the data sheet's rate, which makes it comparable with published numbers, and of the rate that
a large product reaches in the same run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gsm.config.load import instantiate
from gsm.errors import within
from gsm.evaluation.divided import Ranks, join
from gsm.layers.operations import OPS
from gsm.models.base import LanguageModel
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW
from gsm_kernels import explain

from . import machine, models, results, timing
from .models import Entry, Model, known_cost, one_size
from .models import read as read_models
from .results import Asked, Row, mark, quartiles, read, table
from .timing import now

# FLOP/s in bfloat16 without sparsity. A name is missing here if its rate differs or was not looked up.
DATA_SHEET = dict.fromkeys(["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H800"], 989e12)
CLIP = 1.0
PATIENCE = timedelta(minutes=5)  # how long a device waits for another's gradients
ALONE = Ranks()
HEAD = (
    "model", "tokens/s", "x baseline", "ms a step (quartiles)", "peak GiB", "TFLOP a step", "MFU",
    "of a product's rate",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A training: a model of a size, whether activations are recomputed, sequences of a step on each device, tokens of
    each, the numbers of steps that are not timed and that are, and the devices that train together."""

    of: Model
    size: str
    recompute: bool | str
    batch: int
    context: int
    warm_up: int
    steps: int
    ranks: Ranks = ALONE

    def build(self, device: str | torch.device = "cpu") -> LanguageModel:
        """Return the model."""
        return self.of.build(self.size, [f"model.recompute={str(self.recompute).lower()}"], device)

    def optimizer(self) -> AdamW:
        """Return the settings of the optimiser."""
        return instantiate(self.of.config(self.size)["optimizer"], "optimizer")


def run(
    models: Sequence[Entry] = models.ALL,
    size: str | None = None,
    batch_size: int = 4,
    context: int | None = None,
    warm_up: int = 5,
    steps: int = 12,
    compile: bool = False,
    recompute: bool | Literal["selective"] = False,
    **asked: Any,
) -> Path:
    """Measure each model, print the table and write it beside the JSON file; return that file.

    Args: as in configs/benchmark/training.yaml and configs/benchmark.yaml.

    Raises:
        ValueError: a value out of range, a model without a known cost, or a file of another benchmark.
    """
    how = Asked(**asked)
    if how.results:
        return _show(Path(how.results))
    within(1, batch_size=batch_size, context=context, steps=steps)
    within(0, warm_up=warm_up)
    where = machine.chosen(how.device)
    chosen = read_models(models)
    size = one_size(chosen, size, "0p5b" if where.type == "cuda" else "nano")
    ranks = join()
    file = ranks.of_first(lambda: how.open("training", where))
    together = [f"on {ranks.world} devices"] if ranks.world > 1 else []
    marks = {"compiled": compile, "recomputed": recompute is True, "recomputed in part": recompute == "selective"}
    rows = {}
    for model in chosen:
        tokens = context or model.config(size)["data"]["context"]
        how_trained = [*together, *(mark for mark in marks if marks[mark])]
        row = ", ".join([f"{model.name} {size}", f"{batch_size} x {tokens}", *how_trained])
        job = Job(model, size, recompute, batch_size, tokens, warm_up, steps, ranks)
        about = {"model": model.name, "size": size, "batch_size": batch_size, "context": tokens, "compiled": compile}
        about |= {"recompute": recompute, "devices": ranks.world}
        rows[row], file.given[row] = (about, partial(measure, job, where, compile)), model.given
    path = file.fill(rows, {"warm_up": warm_up, "steps": steps}, show=_show, ranks=ranks)
    if ranks.world > 1:
        torch.distributed.destroy_process_group()
    return path


def measure(job: Job, device: torch.device, compile: bool = False) -> dict[str, Any]:
    """Return the row of one model, as plain containers; FLOPs and shares are those of one device.

    Raises ValueError for a model without a known cost.
    """
    roof = timing.ceilings(device)
    plain = known_cost(job.of, job.size, ("model.recompute=false",))  # recomputed activations do not count as work
    flops = job.batch * plain.training_flops(job.context).total()
    row = {"flops": flops, "kernels": explain(OPS), "ceilings": roof._asdict()}
    row |= {"parameters": sum(p.numel() for p in plain.model.parameters())}
    every = range(job.ranks.world)
    found = machine.in_memory(lambda: job.ranks.divided(every, lambda _: timed(job, device, compile)))
    machine.free()
    if found is None:
        return {**row, "failed": _refusal(job)}
    laps, peaks = zip(*found, strict=True)  # of every device
    times, peak = timing.spread(map(max, zip(*laps, strict=True))), max(peak or 0 for peak in peaks)
    seconds, sheet = times.median / 1e3, DATA_SHEET.get(machine.name(device))
    shares = {"mfu": flops / seconds / sheet if sheet else None, "share_of_product": flops / seconds / roof.flops}
    speed = job.ranks.world * job.batch * job.context / seconds
    measured = {"tokens_per_second": speed, "ms": times._asdict(), "peak_gib": peak / 2**30 if peak else None}
    return {**row, **measured, **shares}


def _refusal(job: Job) -> str:
    """Return a sentence: the sizes for which memory ran out, and smaller ones."""
    ways = [f"batch_size={job.batch // 2}" if job.batch > 1 else f"context={max(1, job.context // 2)}"]
    ways += [] if job.recompute else ["recompute=true"]
    return f"out of memory with {job.batch} x {job.context} tokens; try {' or '.join(ways)}"


def timed(job: Job, device: torch.device, compile: bool = False) -> tuple[list[float], int | None]:
    """Return the milliseconds of every timed step, and the peak of memory in bytes on top of the memory held before.

    On a CPU no peak is known: a later model finds room in the memory that an earlier one has left to this process, and
    would come out as the smaller one.
    """
    with machine.watching(device) as peak:
        model = job.build(device)
        if compile:
            model.compile_blocks()
        step, times = step_of(model, job, device, half=device.type == "cuda"), []
        for number in range(job.warm_up + job.steps):
            start = now(device)
            step()
            if number >= job.warm_up:
                times.append(now(device).since(start).wall)
    return times, peak.extra if device.type == "cuda" else None


def step_of(model: LanguageModel, job: Job, device: torch.device, half: bool) -> Callable[[], None]:
    """Return one step of training as ``LanguageModeling`` takes it: model and indexers clipped each by itself, experts
    rebalanced. It leaves out the learning rate's schedule, logs, and the search for numbers that are not finite.
    ``half``: in mixed precision."""
    settings, ranks = job.optimizer(), job.ranks
    batches = random_tokens(model.vocabulary, job.batch, job.context, device, seed=ranks.rank)
    task, optimizer = LanguageModeling(model, settings).to(device), settings.build(model.parameter_groups(), half=half)
    forward: Callable[..., Any] = model
    group = None
    if ranks.world > 1:  # join() connects the hosts; gradients travel between the devices
        group = torch.distributed.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        how = {"process_group": group, "broadcast_buffers": False, "gradient_as_bucket_view": True}  # of trainer=ddp
        with warnings.catch_warnings():  # broadcast_buffers has a successor, newer than the oldest PyTorch that will do
            warnings.simplefilter("ignore", FutureWarning)
            forward = DistributedDataParallel(model, **how)

    def step() -> None:
        batch = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            out = forward(batch["tokens"], documents=batch["documents"], targets=batch["targets"])
            loss = torch.stack([out.loss, *out.losses.values()]).sum()
        loss.backward()
        task.clip(optimizer, CLIP)
        optimizer.step()
        if out.load_LE is not None:
            if group is not None:
                torch.distributed.all_reduce(out.load_LE, group=group)
            model.rebalance(out.load_LE)
        optimizer.zero_grad()

    return step


def random_tokens(
    vocabulary: int, batch: int, context: int, device: torch.device, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of the project's form, without end."""
    generator = torch.Generator(device).manual_seed(seed)
    while True:
        ids_BT = torch.randint(vocabulary, (batch, context + 1), generator=generator, device=device)
        tokens_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
        yield {"tokens": tokens_BT, "targets": targets_BT, "documents": torch.zeros_like(tokens_BT)}


def _show(path: Path) -> Path:
    """Publish the table of a file of results."""
    content = read(path, "compiled")
    cells = [_cells(name, row, alike(content["rows"].values(), row)) for name, row in content["rows"].items()]
    about = models.described(content["rows"].values())
    return results.publish(path, results.measured_on(content), table(HEAD, cells), about)


def _cells(name: str, row: Row, baseline: Row | None) -> tuple[str, ...]:
    if row.get("failed"):
        return name, f"failed: {row['failed']}"
    speed = row["tokens_per_second"]
    ratio = f"{speed / baseline['tokens_per_second']:.3f}" if baseline else ""
    peak = f"{row['peak_gib']:.1f}" if row["peak_gib"] else "not known"
    shares = ["not known" if row[key] is None else f"{row[key]:.1%}" for key in ("mfu", "share_of_product")]
    return name, f"{speed:,.0f}", ratio, quartiles(row["ms"]), peak, f"{row['flops'] / 1e12:.3g}", *shares


def alike(rows: Iterable[Row], row: Row) -> Row | None:
    """Return the row of the baseline that was trained in the same way."""
    how = ("size", "batch_size", "context", "compiled", "recompute", "devices", "protocol")
    same = (r for r in rows if mark(r) == mark(row) and all(r.get(key) == row.get(key) for key in how))
    return next((r for r in same if r["model"] == "baseline" and not r.get("failed")), None)
