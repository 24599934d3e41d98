"""The plan's tables, from its file of results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gsm.benchmarks.turns import short
from gsm_kernels.benchmark.report import table
from gsm_kernels.benchmark.results import read

GIB = 2**30
PARTS = ("weights", "gradients", "optimizer", "buckets", "weights at work", "activations", "layer or logits at work")
MEMORY = ("size", "model", "GPUs", "sharding", "recomputed", "b", *PARTS, "GiB in all", "fits")
TIME = ("size", "model", "GPUs", "sharding", "sequences a step", "step, s", "communication, s", "of the arithmetic",
        "steps", "hours", "hours at the paper's MFU")  # fmt: skip
LENGTHS = ("size", "model", "GPUs", "tokens", "activations, GiB", "GiB in all", "fits", "else divided over",
           "indexers, of FLOPs", "seconds on one GPU", "cache, GiB")  # fmt: skip


def markdown(path: Path) -> str:
    """All tables. Raises ValueError for a file that is none of a plan."""
    content = read(path, "kind")
    runs, lengths = ([row for row in content["rows"].values() if row["kind"] == kind] for kind in ("run", "length"))
    assumed, shown = content["assumed"], {row["gpus"] for row in lengths}
    given = ", ".join(f"{name} {value:g}" for name, value in assumed.items())
    opening = (
        "**Computed, nothing measured**, by `gsm.benchmarks.plan`. "
        f"Commit {content['commit']}, `{content['command']}`. Assumed: {given}. "
        "Bytes in which FSDP2 gathers a weight and averages a gradient, by `trainer=fsdp`: "
        f"{content['fsdp2']['gathered']} and {content['fsdp2']['reduced']}."
    )
    shares = "; ".join(f"{model}: {share:.1%}" for model, share in content["paper_mfu"].items())
    sections = [
        f"# {path.stem}",
        opening,
        _checked(content, runs),
        "Memory of a GPU in GiB; b sequences at a time:",
        table(MEMORY, [_memory(row) for row in runs if row["gpus"] in shown]),
        "Time of the whole run, recomputed where it does not fit otherwise; what does not fit at all is left out. "
        f"The paper's MFU, of its 1.5B ({shares}), is its tokens/s times these FLOPs, over the peak:",
        table(TIME, map(_time, _best(runs))),
        "One sequence on a GPU, with FSDP2 and recomputation; where it does not fit, over how many GPUs its "
        "activations would have to be divided (context parallelism, which this plan does not include):",
        table(LENGTHS, map(_length, lengths)),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _checked(content: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """The paper's measured memory beside what is computed for the same setting."""
    wanted = {"size": "1p5b", "gpus": 8, "sharding": "ddp", "recompute": True, "micro_batch": 4, "context": 4096}
    alike = [row for row in runs if all(row[name] == value for name, value in wanted.items())]
    words = [
        f"{name} {row['memory']['total'] / GIB:.1f} GiB (the paper measured {content['paper_gib'][name]})"
        for row in alike
        for name in [row["model"]]
    ]
    return (
        f"Held against the paper, 1.5B on 8 GPUs, 4 x 4,096 each, DDP, recomputed: {', '.join(words)}." if words else ""
    )


def _memory(row: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = [f"{row['memory'][name] / GIB:.1f}" for name in (*PARTS, "total")]
    return *_which(row), row["sharding"], _yes(row["recompute"]), str(row["micro_batch"]), *numbers, _yes(row["fits"])


def _best(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each way to shard, the one without recomputation if it fits, else the one with, if that does."""
    best: dict[tuple, Mapping[str, Any]] = {}
    for row in runs:
        if row["fits"]:
            best.setdefault((*_which(row), row["sharding"]), row)
    return list(best.values())


def _time(row: Mapping[str, Any]) -> tuple[str, ...]:
    seconds, sharding = row["seconds"], row["sharding"] + (", recomputed" if row["recompute"] else "")
    part = seconds["communication"] / seconds["arithmetic"]
    step = f"{seconds['step']:.3g}", f"{seconds['communication']:.3g}", f"{part:.1%}"
    hours = f"{row['hours']:,.3g}", f"{row['hours_at_papers_mfu']:,.3g}"
    sequences = f"{seconds['tokens'] // row['context']:,}"
    return *_which(row), sharding, sequences, *step, f"{row['steps']:,.0f}", *hours


def _length(row: Mapping[str, Any]) -> tuple[str, ...]:
    parts, over = row["memory"], row["divided_over"]
    sizes = f"{parts['activations'] / GIB:.1f}", f"{parts['total'] / GIB:.1f}"
    divided = "" if row["fits"] else f"{over:,}" if over else "no number"
    rest = f"{row['searching']:.1%}", f"{row['seconds']:.3g}", f"{row['cache_bytes'] / GIB:.3g}"
    return *_which(row), short(row["context"]), *sizes, _yes(row["fits"]), divided, *rest


def _which(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["size"], row["model"], str(row["gpus"])


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
