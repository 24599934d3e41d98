"""How fast models read a prompt and go on from it, and what they keep: the paper's protocol, one row at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from gsm import paths
from gsm.benchmarks import comparisons, figures, goals, paper, projection, texts
from gsm.benchmarks.requests import Protocol, Served
from gsm.benchmarks.turns import Case, take_turns
from gsm.config.load import build_model
from gsm_kernels import explain
from gsm_kernels.benchmark import ceilings, machine
from gsm_kernels.benchmark.report import rate, table
from gsm_kernels.benchmark.results import Errors, Results, read, usual_path

LENGTHS = {"cuda": [256 << n for n in range(11)], "cpu": [256 << n for n in range(7)]}
SYNTHETIC = {"cuda": [4096, 65536, 262144], "cpu": [1024, 65536]}
SIZES, DTYPES = {"cuda": "1p5b", "cpu": "nano"}, {"cuda": "bfloat16", "cpu": "float32"}
WIDTHS = ("float32", "bfloat16", "float16", "float64")
HEAD = (
    "request", "prefill, tokens/s", "ms (quartiles)", "of a product's rate", "of the floor", "decode, tokens/s",
    "ms a token (quartiles)", "of the floor", "kernels (operations) a token", "decoder's operations, KiB",
    "cache, MiB", "peak GiB",
)  # fmt: skip


def run(
    device: str = "auto",
    output: str = "",
    results: str = "",
    force: bool = False,
    minutes: float = 7.5,
    models: Sequence[str] = ("gsm", "baseline", "transformer", "yoco", "gated_delta_net"),
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
        results: a file of results; nothing is measured, and its tables and pictures are made again.
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
        ValueError: a value out of range, or a file of another benchmark.
        FileNotFoundError: there is no such text.
        KeyboardInterrupt: after the table of what there is was made.
        Exception: the first that a case raised, once the others were measured; machine.Lost at once, where the GPU
            takes no more work from this process.
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
    facts = machine.facts(where, paths.PACKAGE, paths.configs())
    file = Results(Path(output) if output else usual_path(facts, "inference"), facts)
    served, errors = _served(protocol, where), Errors()
    left = [case for case in cases if force or not _has(file, case.name(protocol), protocol)]
    try:
        for group in _turns(left, lambda case: file.times(case.name(protocol))):
            names = [case.name(protocol) for case in group]
            if time.monotonic() - began > 60 * minutes:
                print(f"{minutes:g} minutes are over: the same command goes on with {names[0]}")
                break
            print(f"in turns: {'; '.join(names)}", flush=True)
            with errors.kept("; ".join(names)), file.trying(*names):
                for case, row in take_turns(group, served):
                    how = {"protocol": asdict(protocol), "kernels": explain(), "clocks": machine.clocks(where)}
                    file.add(case.name(protocol), {**row, **how})
    finally:
        if file.rows:
            _show(file.path)
    errors.raise_first()
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


def _turns(cases: Sequence[Case], times: Callable[[Case], int]) -> list[list[Case]]:
    """What is measured in turns: neighbours of one length that read prompts, or that decode after synthetic memories.
    Behind them, and each by itself, what has failed or not ended before: one of those took the others with it."""
    new = [case for case in cases if not times(case)]
    groups = groupby(new, key=lambda case: (case.tokens, case.kind == "decode"))
    return [*(list(group) for _, group in groups), *([case] for case in sorted(cases, key=times) if times(case))]


def _has(file: Results, name: str, protocol: Protocol) -> bool:
    """Whether the file holds this row, measured in the same way."""
    there = file.has(name, asdict(protocol))
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
        with torch.device(device), _default(getattr(torch, protocol.dtype)):
            model = build_model(name, protocol.size, seed=0)
        return Served(model, protocol, texts.text(protocol.text, model.vocabulary), roof())

    return made


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, parameters are made in this type: there is no time at which a model takes up more."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _show(path: Path) -> Path:
    """Prints what a file of results holds, and writes it and the pictures beside the file, for each size (more exactly:
    for rows that are alike) by itself."""
    content = read(path, "kind")
    alike = comparisons.groups([{**row, "name": name} for name, row in content["rows"].items()])
    sections = [f"# {path.stem}", _measured_on(content), *(part for rows in alike for part in _sections(rows))]
    text = "\n\n".join(sections) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    for mark, rows in zip(_marks(alike), alike, strict=True):
        _draw(rows, path.with_name(f"{path.stem}{mark}.png"))
    return path


def _marks(alike: Sequence[comparisons.Rows]) -> list[str]:
    """What the names of pictures end in: of one group alone, nothing; else its size, numbered where there are several
    of one size."""
    sizes = [rows[0]["protocol"]["size"] for rows in alike]
    before = [sizes[:place].count(size) for place, size in enumerate(sizes)]
    names = [f"-{size}-{count + 1}" if count else f"-{size}" for size, count in zip(sizes, before, strict=True)]
    return names if len(names) > 1 else [""]


def _draw(rows: comparisons.Rows, path: Path) -> None:
    """The paper's panels; and, as <file>-computed.png, what the cost model says with the measured points upon it, of
    single requests alone."""
    try:
        path.write_bytes(figures.picture(rows))
        protocol, points = rows[0]["protocol"], [_point(row) for row in rows if "decode" in row]
        how = {"chunk": protocol["chunk"], "steps": protocol["steps"], "dtype": getattr(torch, protocol["dtype"])}
        if points and protocol["batch"] == 1:
            projection.plot_against(points, path.with_name(f"{path.stem}-computed.png"), **how)
    except (ImportError, ValueError) as error:  # no matplotlib, or nothing that was measured
        print(error)


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the cost model's picture takes it."""
    times = {f"{what}_seconds": row[what]["ms"]["median"] / 1e3 for what in ("prefill", "decode") if what in row}
    about = {"model": row["model"], "size": row["protocol"]["size"], "tokens": row["tokens"]}
    return {**about, **times, "cache_bytes": row["cache"]["bytes"]}


def _measured_on(content: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"{content['device']}, {versions}, commit {content['commit']}, `{content['command']}`."


def _sections(rows: comparisons.Rows) -> Iterator[str]:
    """Of rows that are alike: how they were measured, the table of all cases, then what it says."""
    yield f"## {figures.about(rows)}, commit {rows[0]['commit']}"
    yield _how(rows)
    yield table(HEAD, map(_cells, rows))
    parts = comparisons.against(rows), comparisons.pruning(rows), comparisons.growth(rows), paper.inference(rows)
    lines = filter(None, [comparisons.by_flops(rows), *goals.verdicts(rows)])
    yield from filter(None, [*parts, _crossings(rows), "\n".join(f"* {line}" for line in lines)])


def _how(rows: comparisons.Rows) -> str:
    protocol, row = rows[0]["protocol"], next((row for row in rows if "text" in row), None)
    runs = f"{protocol['steps']} given tokens, {protocol['warm_up']} runs to warm up and {protocol['runs']} timed"
    said = f"Prompts in chunks of {protocol['chunk']} tokens; {runs}"
    if row is None:
        return f"{said}."
    roof = row["ceilings"]
    products, copies = rate(roof["flops"], "FLOP/s"), rate(roof["bytes"], "B/s")
    return f"{said}; {row['text']}. Ceilings: {products} in {roof['dtype']}, {copies} copied."


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


def _where(crossing: comparisons.Crossing | None) -> str:
    if crossing is None:
        return "not measured"
    if crossing.tokens is None:
        return "GSM does not get ahead of the dense Transformer, as far as the cost model was followed"
    tokens = f"{crossing.tokens:,.0f}"
    return {
        "everywhere": f"GSM is ahead of the dense Transformer at every length measured, from {tokens} tokens",
        "between": f"GSM is ahead of the dense Transformer from about {tokens} tokens (measured)",
        "beyond": f"GSM is ahead of the dense Transformer from about {tokens} tokens (beyond what was measured, by the "
        "cost model)",
        "behind": f"GSM is behind the dense Transformer at {tokens} tokens, the one length measured",
    }[crossing.how]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["name"]
    if row.get("failed"):
        return name, f"failed: {row['failed']}", *("" for _ in HEAD[2:])
    peak = "not known" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    runs = row["runs"]
    if runs != {key: row["protocol"][key] for key in runs}:
        name = f"{name} ({runs['warm_up']} + {runs['runs']} runs)"
    return name, *_prefill_cells(row.get("prefill")), *_decode_cells(row), peak


def _prefill_cells(prefill: Mapping[str, Any] | None) -> tuple[str, ...]:
    if prefill is None:
        return ("",) * 4
    shares = f"{prefill['share_of_product']:.1%}", f"{prefill['share_of_floor']:.1%}"
    return f"{prefill['tokens_per_second']:,.0f}", _ms(prefill["ms"]), *shares


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
