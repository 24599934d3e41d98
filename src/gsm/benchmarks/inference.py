"""How fast models read a prompt and go on from it, and what they keep: the paper's protocol, one row at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from gsm.benchmarks import comparisons, figures, goals, paper, projection, texts
from gsm.benchmarks.requests import Protocol, Served
from gsm.benchmarks.turns import Case, take_turns
from gsm.runs.load import build_model
from gsm_kernels import explain
from gsm_kernels.benchmark import ceilings, machine
from gsm_kernels.benchmark.report import rate, table
from gsm_kernels.benchmark.results import Results, read, usual_path

LENGTHS = {"cuda": [256 << n for n in range(11)], "cpu": [256 << n for n in range(7)]}
SYNTHETIC = {"cuda": [4096, 65536, 262144], "cpu": [1024, 65536]}
SIZES, DTYPES = {"cuda": "1p5b", "cpu": "nano"}, {"cuda": "bfloat16", "cpu": "float32"}
WIDTHS = ("float32", "bfloat16", "float16", "float64")
HEAD = (
    "request", "prefill, tokens/s", "ms (quartiles)", "of a product's rate", "decode, tokens/s",
    "ms a token (quartiles)", "of the floor", "kernels (operations) a token", "decoder's operations, KiB",
    "cache, MiB", "peak GiB",
)  # fmt: skip


def run(
    device: str = "auto",
    output: str = "",
    results: str = "",
    force: bool = False,
    minutes: float = 7.5,
    models: Sequence[str] = ("gsm", "baseline"),
    size: str | None = None,
    lengths: Sequence[int] | None = None,
    synthetic_lengths: Sequence[int] | None = None,
    unpruned: Sequence[str] = (),
    batch_size: int = 1,
    chunk: int = 4096,
    steps: int = 64,
    warm_up: int = 2,
    runs: int = 3,
    seconds: float = 120.0,
    dtype: str | None = None,
    text: str = texts.STDLIB,
) -> Path:
    """Measures each case, prints the table, writes it and the pictures beside the JSON file; returns that file.

    Args:
        device: cpu, cuda; auto: a GPU if there is one.
        output: the file; left out: benchmarks/results/<device>-<date>-inference.json.
        results: a file of results; nothing is measured, and its table and picture are made again.
        force: also what the file holds already.
        minutes: after which no further case is begun.
        models: variants of the group ``model``; at every length they take turns, so that ratios are of one moment.
        size: a variant of the group ``size``; None: 1p5b on a GPU, nano on a CPU.
        lengths: of prompts that are read; None: 256 to 256K on a GPU, to 16K on a CPU.
        synthetic_lengths: after which decoding alone is measured, from memories that only look as if so much had been
            read; None: a few.
        unpruned: models of which also a prefill is measured that computes every row of every layer.
        batch_size: requests at once.
        chunk: tokens of a prompt that are read at a time.
        steps: given tokens that follow a prompt.
        warm_up, runs: runs that are not timed, and that are.
        seconds: of a case, after which it gets no further run once one was timed.
        dtype: of weights and memory; None: bfloat16 on a GPU, float32 on a CPU.
        text: stdlib, random, or a folder or a file of texts.

    Raises:
        ValueError: a value out of range.
        FileNotFoundError: there is no such text.
        KeyboardInterrupt: after the table of what there is was made.
    """
    if results:
        return _show(Path(results))
    given = {"batch_size": batch_size, "chunk": chunk, "steps": steps, "runs": runs}
    wrong = [f"{name} {value}" for name, value in given.items() if value < 1] + ["warm_up"] * (warm_up < 0)
    if wrong or min([*(lengths or [1]), *(synthetic_lengths or [1])]) < 1:
        raise ValueError(f"{', '.join(wrong) or 'a length'}: give 1 or more")
    if dtype not in (None, *WIDTHS):
        raise ValueError(f"dtype is '{dtype}'; say {', '.join(WIDTHS)}, or null for what suits the device")
    where, began = machine.chosen(device), time.monotonic()
    kind = where.type
    size, dtype = size or SIZES[kind], dtype or DTYPES[kind]
    protocol = Protocol(size, batch_size, chunk, steps, warm_up, runs, seconds, dtype, text)
    cases = plan(
        models,
        LENGTHS[kind] if lengths is None else lengths,
        SYNTHETIC[kind] if synthetic_lengths is None else synthetic_lengths,
        unpruned,
        first=size == goals.SIZE,
    )
    facts = machine.facts(where)
    file = Results(Path(output) if output else usual_path(facts, "inference"), facts)
    served = _served(protocol, where)
    try:
        for group in _groups(cases, lambda case: not force and _has(file, case.name(protocol), protocol)):
            if time.monotonic() - began > 60 * minutes:
                print(f"{minutes:g} minutes are over: the same command goes on with {group[0].name(protocol)}")
                break
            print("in turns: " + "; ".join(case.name(protocol) for case in group), flush=True)
            for case, row in take_turns(group, served):
                file.add(case.name(protocol), {**row, "kernels": explain(), "clocks": machine.clocks(where)})
    finally:
        if file.rows:
            _show(file.path)
    return file.path


def plan(
    models: Sequence[str],
    lengths: Sequence[int],
    synthetic_lengths: Sequence[int],
    unpruned: Sequence[str] = (),
    first: bool = False,
) -> list[Case]:
    """All cases, length by length; of a length those that take seconds first.

    Args:
        models, lengths, synthetic_lengths, unpruned: as in ``run``.
        first: whether cases with goals come before all others, and of these decoding alone.
    """
    cases = []
    for tokens in sorted({*lengths, *synthetic_lengths}):
        if tokens in synthetic_lengths:
            cases += [Case(model, tokens, "decode") for model in models]
        if tokens in lengths:
            cases += [Case(model, tokens, "read") for model in models]
            cases += [Case(model, tokens, "unpruned") for model in unpruned]

    def place(case: Case) -> int:
        wanted = first and goals.first(case.model, case.tokens, case.kind)
        return (0 if case.kind == "decode" else 1) if wanted else 2

    return sorted(cases, key=place)


def _groups(cases: Sequence[Case], done: Callable[[Case], bool]) -> Iterator[list[Case]]:
    """What is measured in turns, without what is there already: neighbours of one length that read prompts, or that
    decode after synthetic memories."""
    for _, group in groupby(cases, key=lambda case: (case.tokens, case.kind == "decode")):
        left = [case for case in group if not done(case)]
        if left:
            yield left


def _has(file: Results, name: str, protocol: Protocol) -> bool:
    """Whether the file holds this row, measured in the same way."""
    there = file.has(name) and file.rows[name]["protocol"] == asdict(protocol)
    if there:
        print(f"{name}: measured already")
    return there


def _served(protocol: Protocol, device: torch.device) -> Callable[[str], Served]:
    """The models by name, each built when it is asked for, and kept: at every length all of them run."""

    @cache
    def roof() -> ceilings.Ceilings:
        return ceilings.measure(device)

    @cache
    def made(name: str) -> Served:
        with torch.device(device):
            model = build_model(name, protocol.size, seed=0).to(getattr(torch, protocol.dtype))
        return Served(model, protocol, texts.text(protocol.text, model.vocabulary), roof())

    return made


def _show(path: Path) -> Path:
    """Prints what a file of results holds, and writes it and the pictures beside the file."""
    sections = [f"# {path.stem}", _measured_on(read(path)), *_sections(read(path))]
    text = "\n\n".join(sections) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    try:
        path.with_suffix(".png").write_bytes(figures.picture(path))
        _draw_computed(path)
    except (ImportError, ValueError) as error:  # no matplotlib, or nothing that was measured
        print(error)
    return path


def _draw_computed(path: Path) -> None:
    """What the cost model says, and the measured points upon it, as <file>-computed.png; of single requests alone."""
    rows = [row for row in read(path)["rows"].values() if "decode" in row and row["protocol"]["batch"] == 1]
    if rows:
        protocol = rows[0]["protocol"]
        how = {"chunk": protocol["chunk"], "steps": protocol["steps"], "dtype": getattr(torch, protocol["dtype"])}
        projection.plot_against([_point(row) for row in rows], path.with_name(f"{path.stem}-computed.png"), **how)


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the cost model's picture takes it."""
    times = {f"{what}_seconds": row[what]["ms"]["median"] / 1e3 for what in ("prefill", "decode") if what in row}
    about = {"model": row["model"], "size": row["protocol"]["size"], "tokens": row["tokens"]}
    return {**about, **times, "cache_bytes": row["cache"]["bytes"]}


def _measured_on(content: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    said = f"{content['device']}, {versions}, commit {content['commit']}, `{content['command']}`."
    row = next((row for row in content["rows"].values() if "text" in row), None)
    if row is None:
        return said
    roof, protocol = row["ceilings"], row["protocol"]
    products, copies = rate(roof["flops"], "FLOP/s"), rate(roof["bytes"], "B/s")
    runs = f"{protocol['steps']} given tokens, {protocol['warm_up']} runs to warm up and {protocol['runs']} timed"
    return (
        f"{said} Ceilings: {products} in {roof['dtype']}, {copies} copied. {protocol['dtype']}; {runs}; {row['text']}."
    )


def _sections(content: Mapping[str, Any]) -> Iterator[str]:
    """The table of all cases, then what it says, as far as it was measured."""
    rows = list(content["rows"].values())
    yield table(HEAD, [_cells(*item) for item in content["rows"].items()])
    parts = comparisons.against(rows), comparisons.pruning(rows), comparisons.growth(rows), paper.inference(content)
    yield from filter(None, [*parts, _crossings(rows), "\n".join(f"* {line}" for line in goals.verdicts(rows))])


def _crossings(rows: comparisons.Rows) -> str:
    """Where GSM gets ahead of the dense Transformer, a line each."""
    if not {comparisons.OURS, "transformer"} <= {row["model"] for row in rows}:
        return ""
    size = rows[0]["protocol"]["size"]
    costs = {name: projection.known_cost(name, size) for name in (comparisons.OURS, "transformer")}
    flops = {
        "prefill": lambda name, tokens: costs[name].prefill_flops(tokens, rows[0]["protocol"]["chunk"]).total(),
        "decode": lambda name, tokens: costs[name].decode_flops(tokens).total(),
    }
    found = {what: comparisons.crossing(rows, "transformer", what, flops[what]) for what in flops}
    return "\n".join(f"* {what}: {_where(crossing)}" for what, crossing in found.items())


def _where(crossing: comparisons.Crossing) -> str:
    how = "measured" if crossing.measured else "by the cost model beyond what was measured"
    if crossing.tokens is None:
        return "GSM does not get ahead of the dense Transformer, as far as the cost model was followed"
    return f"GSM is ahead of the dense Transformer from about {crossing.tokens:,.0f} tokens ({how})"


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if row.get("failed"):
        return name, f"failed: {row['failed']}", *("" for _ in HEAD[2:])
    peak = "not known" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    return name, *_prefill_cells(row.get("prefill")), *_decode_cells(row), peak


def _prefill_cells(prefill: Mapping[str, Any] | None) -> tuple[str, ...]:
    if prefill is None:
        return ("",) * 3
    return f"{prefill['tokens_per_second']:,.0f}", _ms(prefill["ms"]), f"{prefill['share_of_product']:.1%}"


def _decode_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "decode" not in row:
        return ("",) * 6
    decode, inside = row["decode"], row["decoder"]
    launched = f"{decode['kernels']} ({decode['operations']})" if decode["kernels"] else f"({decode['operations']})"
    decoder = f"{inside['operations']}, {inside['bytes'] / 1024:,.0f}"
    speed = f"{decode['tokens_per_second']:,.1f}", _ms(decode["ms"]), f"{decode['share_of_floor']:.1%}"
    return *speed, launched, decoder, f"{row['cache']['bytes'] / 2**20:.3f}"


def _ms(found: Mapping[str, float]) -> str:
    spread = f"{found['low']:.4g} to {found['high']:.4g}" if found["laps"] > 1 else "one run"
    return f"{found['median']:.4g} ({spread})"
