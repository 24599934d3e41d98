"""How fast models train on random tokens: whole steps, from the forward pass to the optimiser's, without Lightning.

MFU is the share of the device's arithmetic that the model's own FLOPs (``gsm.models.cost``) take: of the data sheet's
rate, which makes it comparable with what others publish, and of the rate that a large product reaches in the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gsm.callbacks.throughput import peak_memory_bytes
from gsm.models.base import LanguageModel
from gsm.models.cost import cost
from gsm.runs.compose import compose
from gsm.runs.load import build_model, instantiate
from gsm_kernels import explain
from gsm_kernels.benchmark import ceilings, machine
from gsm_kernels.benchmark.report import table
from gsm_kernels.benchmark.results import Results, read, usual_path
from gsm_kernels.benchmark.timing import spread

# FLOP/s in bfloat16 without sparsity; a name that is not here has another rate, or one that nobody looked up.
DATA_SHEET = dict.fromkeys(["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H800"], 989e12)
CLIP = 1.0
HEAD = ("model", "tokens/s", "ms a step (quartiles)", "peak GiB", "TFLOP a step", "MFU", "of a product's rate")


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
        batch_size: sequences of a step.
        context: tokens of a sequence; None: the size's own.
        warm_up, steps: steps that are not timed, and that are.
        compile: whether the model goes through ``torch.compile``.

    Raises:
        ValueError: a value out of range, or a model whose cost is not known.
    """
    if results:
        return _show(Path(results))
    if min(batch_size, steps) < 1 or warm_up < 0 or (context is not None and context < 1):
        raise ValueError(
            f"batch_size {batch_size}, context {context}, steps {steps}, warm_up {warm_up}: give 1 or more"
        )
    where, began = machine.chosen(device), time.monotonic()
    size = size or ("0p5b" if where.type == "cuda" else "nano")
    facts = machine.facts(where)
    file = Results(Path(output) if output else usual_path(facts, "training"), facts)
    for name in models:
        tokens = context or compose([f"model={name}", f"size={size}"])["data"]["context"]
        row = f"{name} {size}, {batch_size} x {tokens}{', compiled' if compile else ''}"
        if file.has(row) and not force:
            print(f"{row}: measured already")
        elif time.monotonic() - began > 60 * minutes:
            print(f"{minutes:g} minutes are over: the same command goes on with {row}")
        else:
            print(f"{row}: {warm_up} + {steps} steps", flush=True)
            file.add(row, measure(name, size, batch_size, tokens, warm_up, steps, where, compile))
    return _show(file.path)


def measure(
    name: str,
    size: str,
    batch: int,
    context: int,
    warm_up: int,
    steps: int,
    device: torch.device,
    compile: bool = False,
) -> dict[str, Any]:
    """The row of one model, as plain containers. Raises ValueError for a model whose cost is not known."""
    roof = ceilings.measure(device)
    with torch.device(device):
        model = build_model(name, size, seed=0)
    flops = batch * cost(model).training_flops(context).total()
    row = {"model": name, "size": size, "batch_size": batch, "context": context, "compiled": compile, "flops": flops}
    row |= {"parameters": sum(p.numel() for p in model.parameters()), "kernels": explain(), "ceilings": roof._asdict()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if compile:
        model.compile()
    try:
        times = _times(_step(model, name, size, batch, context, device), warm_up, steps, device)
    except torch.cuda.OutOfMemoryError:
        return {**row, "failed": f"out of memory with {batch} sequences"}
    finally:
        peak = peak_memory_bytes(device)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    found = spread(times)
    seconds, sheet = found.median / 1e3, DATA_SHEET.get(machine.name(device))
    shares = {"mfu": flops / seconds / sheet if sheet else None, "share_of_product": flops / seconds / roof.flops}
    measured = {"tokens_per_second": batch * context / seconds, "ms": found._asdict(), "peak_gib": peak / 2**30}
    return {**row, **measured, **shares, "clocks": machine.clocks(device)}


def _step(
    model: LanguageModel, name: str, size: str, batch: int, context: int, device: torch.device
) -> Callable[[], None]:
    """One step of training: what the trainer does, without what it logs."""
    optimizer = instantiate(compose([f"model={name}", f"size={size}"])["optimizer"], "optimizer")
    optimizer = optimizer.build(model.parameter_groups())
    generator = torch.Generator(device).manual_seed(0)
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step() -> None:
        tokens_BT = torch.randint(model.vocabulary, (batch, context + 1), generator=generator, device=device)
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
    text = f"# {path.stem}\n\n{opening}\n\n{table(HEAD, [_cells(*row) for row in content['rows'].items()])}\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return path


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if row.get("failed"):
        return name, f"failed: {row['failed']}", *("" for _ in HEAD[2:])
    ms, share = row["ms"], lambda value: f"{value:.1%}" if value is not None else "not known"
    timed = f"{row['tokens_per_second']:,.0f}", f"{ms['median']:.4g} ({ms['low']:.4g} to {ms['high']:.4g})"
    shares = share(row["mfu"]), share(row["share_of_product"])
    return name, *timed, f"{row['peak_gib']:.1f}", f"{row['flops'] / 1e12:.3g}", *shares
