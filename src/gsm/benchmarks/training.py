"""How fast models train on random tokens: whole steps, from the forward pass to the optimiser's, without Lightning on
one device, and with its DDP on several.

MFU is the share of the device's arithmetic that the model's own FLOPs (``gsm.costs.model``) take, recomputed
activations left out: of the data sheet's rate, which makes it comparable with what others publish, and of the rate that
a large product reaches in the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from gsm import paths
from gsm.benchmarks import distributed, paper
from gsm.benchmarks.distributed import Job, Selection
from gsm.benchmarks.room import out_of_memory, watching
from gsm.config.compose import compose
from gsm.config.load import build_model
from gsm.costs.model import cost
from gsm.models.base import LanguageModel
from gsm.training.module import LanguageModeling
from gsm_kernels import explain
from gsm_kernels.benchmark import ceilings, machine
from gsm_kernels.benchmark.report import table
from gsm_kernels.benchmark.results import Results, read, usual_path
from gsm_kernels.benchmark.timing import spread

# FLOP/s in bfloat16 without sparsity; a name that is not here has another rate, or one that nobody looked up.
DATA_SHEET = dict.fromkeys(["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H800"], 989e12)
CLIP = 1.0
HEAD = (
    "model", "tokens/s", "x baseline", "ms a step (quartiles)", "peak GiB", "TFLOP a step", "MFU",
    "of a product's rate",
)  # fmt: skip


def run(
    device: str = "auto",
    output: str = "",
    results: str = "",
    force: bool = False,
    minutes: float = 7.5,
    models: Sequence[str] = ("gsm", "baseline", "transformer", "yoco", "gated_delta_net"),
    size: str | None = None,
    batch_size: int = 4,
    context: int | None = None,
    warm_up: int = 5,
    steps: int = 12,
    compile: bool = False,
    recompute: bool | Literal["selective"] = False,
    devices: int = 1,
) -> Path:
    """Measures each model, prints the table and writes it beside the JSON file; returns that file.

    Args:
        device: cpu, cuda; auto: a GPU if there is one.
        output: the file; left out: benchmarks/results/<device>-<date>-training.json.
        results: a file of results; nothing is measured, and its table is made again.
        force: also what the file holds already.
        minutes: after which no further model is begun.
        models: variants of the group ``model``.
        size: a variant of the group ``size``; None: 0p5b on a GPU, nano on a CPU.
        batch_size: sequences of a step, on each device.
        context: tokens of a sequence; None: the size's own.
        warm_up, steps: steps that are not timed, and that are.
        compile: whether the model goes through ``torch.compile``.
        recompute: whether activations are recomputed in the backward pass, in every model alike; ``selective``: those
            that are cheap.
        devices: how many train together, as many GPUs or processes; several through Lightning's DDP.

    Raises:
        ValueError: a value out of range, a model whose cost is not known, or a file of another benchmark.
        KeyboardInterrupt: after the table of what there is was made.
    """
    if results:
        return _show(Path(results))
    if min(batch_size, steps, devices) < 1 or warm_up < 0 or (context is not None and context < 1):
        raise ValueError(
            f"batch_size {batch_size}, context {context}, steps {steps}, warm_up {warm_up}, devices {devices}: "
            "give 1 or more"
        )
    if devices > 1 and compile:
        raise ValueError(f"devices is {devices} and compile is true: compile is measured on one device; leave it out")
    where = machine.chosen(device)
    size = size or ("0p5b" if where.type == "cuda" else "nano")
    facts = machine.facts(where, paths.PACKAGE, paths.configs())
    file = Results(Path(output) if output else usual_path(facts, "training"), facts)
    marks = {f"{devices} devices": devices > 1, "compiled": compile, "recomputed": recompute is True}
    marks["recomputed in part"] = recompute == "selective"
    rows = []
    for name in models:
        tokens = context or compose([f"model={name}", f"size={size}"])["data"]["context"]
        row = ", ".join([f"{name} {size}", f"{batch_size} x {tokens}", *(mark for mark in marks if marks[mark])])
        job = Job(name, size, recompute, batch_size, tokens, warm_up, steps, where.type, devices)
        rows.append((row, f"{warm_up} + {steps} steps", partial(measure, job, where, compile)))
    protocol = {"warm_up": warm_up, "steps": steps}
    return file.fill(rows, protocol, force=force, minutes=minutes, show=_show)


def measure(job: Job, device: torch.device, compile: bool = False) -> dict[str, Any]:
    """The row of one model, as plain containers. Raises ValueError for a model whose cost is not known."""
    roof = ceilings.measure(device)
    with torch.device("meta"):
        plain = build_model(job.name, job.size)  # what is only recomputed does not count as work
    flops = job.batch * cost(plain).training_flops(job.context).total()
    row = {"model": job.name, "size": job.size, "batch_size": job.batch, "context": job.context, "compiled": compile}
    row |= {"recompute": job.recompute, "devices": job.devices, "flops": flops, "kernels": explain()}
    row |= {"parameters": sum(p.numel() for p in plain.parameters()), "ceilings": roof._asdict()}
    found = None
    try:
        found = distributed.measure(job) if job.devices > 1 else _alone(job, device, compile)
    except (RuntimeError, MemoryError, ProcessRaisedException) as error:
        if not out_of_memory(error):
            raise
    gc.collect()  # only here: until its handler ends, an error holds on to what was taken
    torch.cuda.empty_cache()
    if found is None:
        return {**row, "failed": _refusal(job)}
    times = spread(found.times)
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


def _alone(job: Job, device: torch.device, compile: bool) -> Selection:
    """The steps of a model on one device. On a CPU no peak is known: a later model finds room in what an earlier one
    has left to this process, and would come out as the smaller one."""
    with watching(device) as peak:
        with torch.device(device):
            model = job.build()
        if compile:
            model.compile()
        times = _times(_step(model, job, device), job.warm_up, job.steps, device)
    return Selection(times, peak.extra if device.type == "cuda" else None)


def _step(model: LanguageModel, job: Job, device: torch.device) -> Callable[[], None]:
    """One step of training as ``LanguageModeling`` takes it: model and indexers clipped each by itself, experts
    rebalanced. Left out are the learning rate's schedule, logs, and the look for what is not finite."""
    settings, generator = job.optimizer(), torch.Generator(device).manual_seed(0)
    task, optimizer = LanguageModeling(model, settings).to(device), settings.build(model.parameter_groups())
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step() -> None:
        ids_BT = torch.randint(model.vocabulary, (job.batch, job.context + 1), generator=generator, device=device)
        tokens_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
        with half:
            out = model(tokens_BT, documents=torch.zeros_like(tokens_BT), targets=targets_BT)
            loss = torch.stack([out.loss, *out.losses.values()]).sum()
        loss.backward()
        task.clip(optimizer, CLIP)
        optimizer.step()
        if out.load_LE is not None:
            model.rebalance(out.load_LE)
        optimizer.zero_grad()

    return step


def _times(step: Callable[[], None], warm_up: int, steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each step after the first ones, by the wall clock, until the device has finished it."""
    times = []
    for number in range(warm_up + steps):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= warm_up:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def _show(path: Path) -> Path:
    """Prints the table of a file of results and writes it beside the file."""
    content = read(path, "compiled")
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    opening = f"{content['device']}, {versions}, commit {content['commit']}, `{content['command']}`."
    rows = content["rows"]
    cells = [_cells(name, row, paper.alike(rows.values(), "baseline", row)) for name, row in rows.items()]
    sections = filter(None, [f"# {path.stem}", opening, table(HEAD, cells), paper.training(content)])
    text = "\n\n".join(sections) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return path


def _cells(name: str, row: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> tuple[str, ...]:
    if row.get("failed"):
        return name, f"failed: {row['failed']}", *("" for _ in HEAD[2:])
    ms, share = row["ms"], lambda value: f"{value:.1%}" if value is not None else "not known"
    speed = row["tokens_per_second"]
    ratio = f"{speed / baseline['tokens_per_second']:.3f}" if baseline else ""
    timed = f"{speed:,.0f}", ratio, f"{ms['median']:.4g} ({ms['low']:.4g} to {ms['high']:.4g})"
    shares = share(row["mfu"]), share(row["share_of_product"])
    peak = f"{row['peak_gib']:.1f}" if row["peak_gib"] else "not known"
    return name, *timed, peak, f"{row['flops'] / 1e12:.3g}", *shares
