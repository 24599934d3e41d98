"""How fast models train on random tokens: whole steps, from the forward pass to the optimiser's, without Lightning on
one device, and with its DDP on several.

MFU is the share of the device's arithmetic that the model's own FLOPs (``gsm.costs.model``) take, recomputed
activations left out: of the data sheet's rate, which makes it comparable with what others publish, and of the rate that
a large product reaches in the same run.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gsm.config.load import instantiate
from gsm.models.base import LanguageModel
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW
from gsm_kernels import explain

from . import entries, machine, paper, results, timing
from .entries import Entry, Model, known_cost
from .paper import OURS
from .results import Asked, Row, mark, quartiles, read, table
from .timing import Moment, now

# FLOP/s in bfloat16 without sparsity; a name that is not here has another rate, or one that nobody looked up.
DATA_SHEET = dict.fromkeys(["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H800"], 989e12)
CLIP = 1.0
HEAD = (
    "model", "tokens/s", "x baseline", "ms a step (quartiles)", "peak GiB", "TFLOP a step", "MFU",
    "of a product's rate",
)  # fmt: skip
UNITS = {"tokens_per_second": "tokens/s", "peak_gib": "peak GiB a GPU", "seconds": "s a step"}


@dataclass(frozen=True)
class Job:
    """What is trained, and for how long: which model of which size, whether activations are recomputed, sequences on
    each device, tokens of a sequence, steps that are not timed and that are, and how many devices of which kind."""

    of: Model
    size: str
    recompute: bool | str
    batch: int
    context: int
    warm_up: int
    steps: int
    kind: str
    devices: int

    def build(self, device: str | torch.device = "cpu") -> LanguageModel:
        """The model, the same in every process."""
        return self.of.build(self.size, [f"model.recompute={str(self.recompute).lower()}"], device)

    def optimizer(self) -> AdamW:
        """The settings of the optimiser."""
        return instantiate(self.of.config(self.size)["optimizer"], "optimizer")


class Steps(NamedTuple):
    """Milliseconds of every timed step, and the largest peak of memory of any device, in bytes, on top of what its
    process held before there was a model (None: not known)."""

    times: list[float]
    peak: int | None


def run(
    models: Sequence[Entry] = entries.ALL,
    size: str | None = None,
    batch_size: int = 4,
    context: int | None = None,
    warm_up: int = 5,
    steps: int = 12,
    compile: bool = False,
    recompute: bool | Literal["selective"] = False,
    devices: int = 1,
    **asked: Any,
) -> Path:
    """Measure each model, print the table and write it beside the JSON file; return that file.

    Args: as in configs/benchmark/training.yaml and configs/benchmark.yaml, which say what they mean.

    Raises:
        ValueError: a value out of range, a model whose cost is not known, or a file of another benchmark.
        KeyboardInterrupt: after the table of what there is was made.
    """
    how = Asked(**asked)
    if how.results:
        return _show(Path(how.results))
    if min(batch_size, steps, devices) < 1 or warm_up < 0 or (context is not None and context < 1):
        raise ValueError(
            f"batch_size {batch_size}, context {context}, steps {steps}, warm_up {warm_up}, devices {devices}: "
            "give 1 or more"
        )
    if devices > 1 and compile:
        raise ValueError(f"devices is {devices} and compile is true: compile is measured on one device; leave it out")
    where = machine.chosen(how.device)
    known = entries.read(models)
    size = entries.one_size(known, size, "0p5b" if where.type == "cuda" else "nano")
    file = how.open("training", where, models=True)
    marks = {f"{devices} devices": devices > 1, "compiled": compile, "recomputed": recompute is True}
    marks["recomputed in part"] = recompute == "selective"
    rows = {}
    for model in known:
        tokens = context or model.config(size)["data"]["context"]
        row = ", ".join([f"{model.name} {size}", f"{batch_size} x {tokens}", *(mark for mark in marks if marks[mark])])
        job = Job(model, size, recompute, batch_size, tokens, warm_up, steps, where.type, devices)
        rows[row], file.given[row] = partial(measure, job, where, compile), model.given
    return file.fill(rows, {"warm_up": warm_up, "steps": steps}, force=how.force, show=_show)


def measure(job: Job, device: torch.device, compile: bool = False) -> dict[str, Any]:
    """The row of one model, as plain containers. Raises ValueError for a model whose cost is not known."""
    roof = timing.ceilings(device)
    plain = known_cost(job.of, job.size, ("model.recompute=false",))  # what is only recomputed does not count as work
    flops = job.batch * plain.training_flops(job.context).total()
    row = {"model": job.of.name, "size": job.size, "batch_size": job.batch, "context": job.context, "compiled": compile}
    row |= {"recompute": job.recompute, "devices": job.devices, "flops": flops, "kernels": explain()}
    row |= {"parameters": sum(p.numel() for p in plain.model.parameters()), "ceilings": roof._asdict()}
    found = machine.in_memory(lambda: _together(job) if job.devices > 1 else _alone(job, device, compile))
    machine.free()
    if found is None:
        return {**row, "failed": _refusal(job)}
    times = timing.spread(found.times)
    seconds, sheet = times.median / 1e3, DATA_SHEET.get(machine.name(device))
    shares = {"mfu": flops / seconds / sheet if sheet else None, "share_of_product": flops / seconds / roof.flops}
    speed = job.devices * job.batch * job.context / seconds
    measured = {"tokens_per_second": speed, "ms": times._asdict(), "peak_gib": found.peak and found.peak / 2**30}
    return {**row, **measured, **shares, "clocks": machine.clocks(device)}


def _refusal(job: Job) -> str:
    """One sentence: what ran out of memory, and what takes less."""
    ways = [f"batch_size={job.batch // 2}" if job.batch > 1 else f"context={max(1, job.context // 2)}"]
    ways += [] if job.recompute else ["recompute=true"]
    return f"out of memory with {job.batch} x {job.context} tokens on a device; try {' or '.join(ways)}"


def _alone(job: Job, device: torch.device, compile: bool) -> Steps:
    """The steps of a model on one device. On a CPU no peak is known: a later model finds room in what an earlier one
    has left to this process, and would come out as the smaller one."""
    with machine.watching(device) as peak:
        model = job.build(device)
        if compile:
            model.compile_blocks()
        step, times = _step(model, job, device), []
        for number in range(job.warm_up + job.steps):
            start = now(device)
            step()
            if number >= job.warm_up:
                times.append(now(device).since(start).wall)
    return Steps(times, peak.extra if device.type == "cuda" else None)


def _step(model: LanguageModel, job: Job, device: torch.device) -> Callable[[], None]:
    """One step of training as ``LanguageModeling`` takes it: model and indexers clipped each by itself, experts
    rebalanced. Left out are the learning rate's schedule, logs, and the look for what is not finite."""
    settings, batches = job.optimizer(), iter(RandomTokens(model.vocabulary, job.batch, job.context, 0, device))
    task, optimizer = LanguageModeling(model, settings).to(device), settings.build(model.parameter_groups())
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step() -> None:
        batch = next(batches)
        with half:
            out = model(batch["tokens"], documents=batch["documents"], targets=batch["targets"])
            loss = torch.stack([out.loss, *out.losses.values()]).sum()
        loss.backward()
        task.clip(optimizer, CLIP)
        optimizer.step()
        if out.load_LE is not None:
            model.rebalance(out.load_LE)
        optimizer.zero_grad()

    return step


class RandomTokens(IterableDataset):
    """Batches of the project's form, without end; every rank draws its own."""

    def __init__(self, vocabulary: int, batch: int, context: int, seed: int, device: str | torch.device = "cpu"):
        self.vocabulary, self.shape, self.seed, self.device = vocabulary, (batch, context + 1), seed, device

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        while True:
            ids_BT = torch.randint(self.vocabulary, self.shape, generator=generator, device=self.device)
            tokens_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
            yield {"tokens": tokens_BT, "targets": targets_BT, "documents": torch.zeros_like(tokens_BT)}


# On several devices: Lightning's DDP around the project's own module, a process for each device.


def _together(job: Job) -> Steps:
    """The steps of several processes. Raises ProcessRaisedException with the traceback of one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(_train, (job, port, str(path)), nprocs=job.devices)
        return Steps(**json.loads(path.read_text(encoding="utf-8")))


def _train(rank: int, job: Job, port: int, path: str) -> None:
    """One of the processes; the first one writes what was found."""
    for name in ("lightning.pytorch", "lightning.fabric"):  # what Lightning tells everybody
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    # What torchrun would say: Lightning then starts no processes itself.
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if job.kind == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.devices))
    clock = Clock(job.warm_up)
    trainer = lightning.Trainer(
        accelerator=job.kind,
        devices=job.devices,
        strategy="ddp",
        precision="bf16-mixed" if job.kind == "cuda" else "32-true",
        max_steps=job.warm_up + job.steps,
        gradient_clip_val=CLIP,
        log_every_n_steps=job.warm_up + job.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with machine.watching(torch.device(job.kind, rank)) as reached:
        task = LanguageModeling(job.build(), job.optimizer())
        tokens = RandomTokens(task.model.vocabulary, job.batch, job.context, rank)
        trainer.fit(task, DataLoader(tokens, batch_size=None))
    peak = torch.tensor(float(reached.extra or 0), dtype=torch.float64)
    peak = trainer.strategy.reduce(peak.to(trainer.strategy.root_device), reduce_op="max")
    if trainer.is_global_zero:
        Path(path).write_text(json.dumps({"times": clock.times, "peak": int(peak) or None}), encoding="utf-8")
    torch.distributed.destroy_process_group()  # a thread of its that outlives the interpreter aborts the process


class Clock(lightning.Callback):
    """Milliseconds of each step after the first ones, when the device has finished it.

    Attributes:
        times: of the timed steps.
    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.times, self._start = warm_up, [], Moment(0.0, 0.0)

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._start = now(pl_module.device)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop it."""
        if batch_idx >= self.warm_up:
            self.times.append(now(pl_module.device).since(self._start).wall)


def _show(path: Path) -> Path:
    """Publish the table of a file of results."""
    content = read(path, "compiled")
    cells = [_cells(name, row, alike(content["rows"].values(), row)) for name, row in content["rows"].items()]
    about = entries.described(content["rows"].values())
    return results.publish(path, results.measured_on(content), table(HEAD, cells), about, paper_table(content))


def _cells(name: str, row: Row, baseline: Row | None) -> tuple[str, ...]:
    if row.get("failed"):
        return name, f"failed: {row['failed']}"
    speed, share = row["tokens_per_second"], lambda value: f"{value:.1%}" if value is not None else "not known"
    ratio = f"{speed / baseline['tokens_per_second']:.3f}" if baseline else ""
    peak = f"{row['peak_gib']:.1f}" if row["peak_gib"] else "not known"
    shares = share(row["mfu"]), share(row["share_of_product"])
    return name, f"{speed:,.0f}", ratio, quartiles(row["ms"]), peak, f"{row['flops'] / 1e12:.3g}", *shares


def alike(rows: Iterable[Row], row: Row) -> Row | None:
    """The baseline's row that was trained as this one was."""
    how = ("size", "batch_size", "context", "compiled", "recompute", "devices", "protocol")
    same = (r for r in rows if mark(r) == mark(row) and all(r.get(key) == row.get(key) for key in how))
    return next((r for r in same if r["model"] == "baseline" and not r.get("failed")), None)


def paper_table(content: Mapping[str, Any]) -> str:
    """The paper's table of training efficiency beside the pairs of a file of results; empty without a pair."""
    theirs, rows = paper.TRAINING, content["rows"]
    cells = [_paper_cells(f"paper: {UNITS[name]}", theirs["baseline"][name], theirs[OURS][name]) for name in UNITS]
    for name, row in rows.items():
        baseline = alike(rows.values(), row)
        if row["model"] == OURS and not row.get("failed") and baseline:
            pairs = {key: (value(baseline, key), value(row, key)) for key in UNITS}
            cells += [_paper_cells(f"{name}: {UNITS[key]}", *pair) for key, pair in pairs.items() if None not in pair]
    if len(cells) == len(UNITS):
        return ""
    head = ("", "baseline", "GSM", "GSM / baseline")
    return f"The paper's: {theirs['device']}, {theirs['what']}. Ours: {content['device']}.\n\n{table(head, cells)}"


def value(row: Row, name: str) -> Any:
    """Seconds of a step, or what else a row holds under this name."""
    return row["ms"]["median"] / 1e3 if name == "seconds" else row[name]


def _paper_cells(what: str, baseline: float, ours: float) -> Sequence[str]:
    return what, f"{baseline:,.5g}", f"{ours:,.5g}", f"{ours / baseline:.3f}"
