"""How fast models train on random tokens: whole steps, from the forward pass to the optimiser's, without Lightning on
one device, and with its DDP on several.

MFU is the share of the device's arithmetic that the model's own FLOPs (``gsm.models.cost``) take, recomputed
activations left out: of the data sheet's rate, which makes it comparable with what others publish, and of the rate that
a large product reaches in the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gsm.benchmarks import distributed, paper
from gsm.benchmarks.distributed import Found, Job
from gsm.callbacks.throughput import peak_memory_bytes
from gsm.models.base import LanguageModel
from gsm.models.cost import cost
from gsm.runs.compose import compose
from gsm.runs.load import build_model
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
    models: Sequence[str] = ("gsm", "baseline"),
    size: str | None = None,
    batch_size: int = 4,
    context: int | None = None,
    warm_up: int = 5,
    steps: int = 12,
    compile: bool = False,
    recompute: bool = False,
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
        recompute: whether activations are recomputed in the backward pass, in every model alike.
        devices: how many train together, as many GPUs or processes; several through Lightning's DDP.

    Raises:
        ValueError: a value out of range, or a model whose cost is not known.
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
    where, began = machine.chosen(device), time.monotonic()
    size = size or ("0p5b" if where.type == "cuda" else "nano")
    facts = machine.facts(where)
    file = Results(Path(output) if output else usual_path(facts, "training"), facts)
    for name in models:
        tokens = context or compose([f"model={name}", f"size={size}"])["data"]["context"]
        marks = {f"{devices} devices": devices > 1, "compiled": compile, "recomputed": recompute}
        row = ", ".join([f"{name} {size}", f"{batch_size} x {tokens}", *(mark for mark in marks if marks[mark])])
        if file.has(row) and not force:
            print(f"{row}: measured already")
        elif time.monotonic() - began > 60 * minutes:
            print(f"{minutes:g} minutes are over: the same command goes on with {row}")
        else:
            print(f"{row}: {warm_up} + {steps} steps", flush=True)
            job = Job(name, size, recompute, batch_size, tokens, warm_up, steps, where.type, devices)
            file.add(row, measure(job, where, compile))
    return _show(file.path)


def measure(job: Job, device: torch.device, compile: bool = False) -> dict[str, Any]:
    """The row of one model, as plain containers. Raises ValueError for a model whose cost is not known."""
    roof = ceilings.measure(device)
    with torch.device("meta"):
        plain = build_model(job.name, job.size)  # what is only recomputed does not count as work
    flops = job.batch * cost(plain).training_flops(job.context).total()
    row = {"model": job.name, "size": job.size, "batch_size": job.batch, "context": job.context, "compiled": compile}
    row |= {"recompute": job.recompute, "devices": job.devices, "flops": flops, "kernels": explain()}
    row |= {"parameters": sum(p.numel() for p in plain.parameters()), "ceilings": roof._asdict()}
    try:
        found = distributed.measure(job) if job.devices > 1 else _alone(job, device, compile)
    except torch.cuda.OutOfMemoryError:
        return {**row, "failed": f"out of memory with {job.batch} sequences"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    times = spread(found.times)
    seconds, sheet = times.median / 1e3, DATA_SHEET.get(machine.name(device))
    shares = {"mfu": flops / seconds / sheet if sheet else None, "share_of_product": flops / seconds / roof.flops}
    speed = job.devices * job.batch * job.context / seconds
    measured = {"tokens_per_second": speed, "ms": times._asdict(), "peak_gib": found.peak / 2**30}
    return {**row, **measured, **shares, "clocks": machine.clocks(device)}


def _alone(job: Job, device: torch.device, compile: bool) -> Found:
    """The steps of a model on one device."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.device(device):
        model = job.build()
    if compile:
        model.compile()
    times = _times(_step(model, job, device), job.warm_up, job.steps, device)
    return Found(times, peak_memory_bytes(device))


def _step(model: LanguageModel, job: Job, device: torch.device) -> Callable[[], None]:
    """One step of training: what the trainer does, without what it logs."""
    optimizer = job.optimizer().build(model.parameter_groups())
    generator = torch.Generator(device).manual_seed(0)
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step() -> None:
        tokens_BT = torch.randint(model.vocabulary, (job.batch, job.context + 1), generator=generator, device=device)
        with half:
            out = model(tokens_BT[:, :-1], targets=tokens_BT[:, 1:])
            loss = torch.stack([out.loss, *out.losses.values()]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
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
    content = read(path)
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
    return name, *timed, f"{row['peak_gib']:.1f}", f"{row['flops'] / 1e12:.3g}", *shares
