"""What a file of `benchmark=inference` says of GSM: beside the others, with and without pruning, as texts grow, beside
its goals on a Hopper GPU and the paper's claims; and its pictures.

All of it is said of rows that are alike (``groups``): of one protocol, commit and device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from . import entries, paper, projection, results
from .pictures import panels, short
from .results import Row, mark, rate, read, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gsm.evaluation.plots import Style

OURS = paper.OURS
NAMES = {OURS: "GSM"}  # in tables, of a model that has another one than in rows
HEAD = (
    "request", "prefill, tokens/s", "ms (quartiles)", "of a product's rate", "of the floor", "decode, tokens/s",
    "ms a token (quartiles)", "of the floor", "kernels (operations) a token", "decoder's operations, KiB",
    "cache, MiB", "peak GiB",
)  # fmt: skip
AGAINST = (
    "tokens", "prefill, x as fast", "by processor time", "by FLOPs", "decode, x as fast",
    "by processor time", "by bytes", "cache, x", "by formula",
)  # fmt: skip
PRUNING = ("model", "tokens", "prefill, x its unpruned forward", "by processor time", "by FLOPs")
GROWTH = (
    "model", "decode", "ms a token, x", "decoder's operations, x", "decoder's bytes, x", "cache, x",
    "shared state, bytes",
)  # fmt: skip
CLOSE = 0.15  # of the ratio of FLOPs, which a ratio of prefill times is to come as near as
SIZE, K = "1p5b", 1024  # of the goals

Rows = Sequence[Row]


class Goal(NamedTuple):
    """GSM is to reach ``least`` at so many tokens: tokens/s in ``prefill`` or ``decode``; times the baseline's in
    ``prefill over baseline``; a share of its speed at 4K in ``decode over 4K``; ``kernels`` a token, and the distance
    of the ``cache`` from its formula, at most."""

    tokens: int
    what: str
    least: float
    level: Literal["must", "aim"]

    def __str__(self) -> str:
        unit = {"prefill": " tokens/s", "decode": " tokens/s", "cache": " from the formula"}.get(self.what, "")
        most = "at most " * (self.what in AT_MOST)
        return f"{self.level} {short(self.tokens)} {self.what}: {most}{self.least:,g}{unit}"


GOALS = (
    Goal(4 * K, "decode", 620, "aim"),
    Goal(64 * K, "decode", 615, "aim"),
    Goal(256 * K, "decode", 600, "aim"),
    Goal(256 * K, "decode over 4K", 0.97, "must"),
    Goal(4 * K, "kernels", 240, "must"),
    Goal(4 * K, "prefill", 250e3, "aim"),
    Goal(64 * K, "prefill", 290e3, "aim"),
    Goal(256 * K, "prefill", 260e3, "aim"),
    Goal(64 * K, "prefill over baseline", 1.3, "must"),
    Goal(256 * K, "prefill over baseline", 1.3, "must"),
    Goal(64 * K, "cache", 0.01, "must"),
)
AT_MOST = ("kernels", "cache")


def first(model: str, tokens: int, kind: str) -> bool:
    """Whether a case is wanted before others: goals are set for it, or for what it is held against."""
    return kind != "unpruned" and model in (OURS, "baseline") and any(goal.tokens == tokens for goal in GOALS)


def show(path: Path) -> Path:
    """Publish what a file of results holds, and draw pictures beside it, for each size (more exactly: for rows that are
    alike) by itself."""
    content = read(path, "kind")
    alike = groups([{**row, "name": name} for name, row in content["rows"].items()])
    sections = [part for rows in alike for part in _sections(rows)]
    results.publish(path, results.measured_on(content), *sections)
    for name, rows in zip(_names(alike), alike, strict=True):
        try:
            path.with_name(f"{path.stem}{name}.png").write_bytes(picture(rows))
            computed(rows, path.with_name(f"{path.stem}{name}-computed.png"))
        except (ImportError, ValueError) as error:  # no matplotlib, or nothing that was measured
            print(error)
    return path


def _names(alike: Sequence[Rows]) -> list[str]:
    """What the names of pictures end in: of one group alone, nothing; else its size, numbered where there are several
    of one size."""
    sizes = [rows[0]["protocol"]["size"] for rows in alike]
    before = [sizes[:place].count(size) for place, size in enumerate(sizes)]
    names = [f"-{size}-{count + 1}" if count else f"-{size}" for size, count in zip(sizes, before, strict=True)]
    return names if len(names) > 1 else [""]


def _sections(rows: Rows) -> Iterator[str]:
    """Of rows that are alike: how they were measured, the table of all cases, then what it says."""
    yield f"## {about(rows)}, commit {rows[0]['commit']}"
    yield _how(rows)
    yield table(HEAD, map(_cells, rows))
    yield entries.described(rows)
    lines = filter(None, [by_flops(rows), *verdicts(rows)])
    yield from (against(rows), pruning(rows), growth(rows), _crossings(rows))
    yield "\n".join(f"* {line}" for line in lines)


def about(rows: Rows) -> str:
    """What rows that are alike have in common, as a title."""
    protocol = rows[0]["protocol"]
    return f"{protocol['size']}, {protocol['dtype']}, batch {protocol['batch']}, {rows[0]['device']}"


def _how(rows: Rows) -> str:
    protocol, row = rows[0]["protocol"], next((row for row in rows if "text" in row), None)
    runs = f"{protocol['steps']} given tokens, {protocol['warm_up']} runs to warm up and {protocol['runs']} timed"
    said = f"Prompts in chunks of {protocol['chunk']} tokens; {runs}"
    if row is None:
        return f"{said}."
    roof = row["ceilings"]
    products, copies = rate(roof["flops"], "FLOP/s"), rate(roof["bytes"], "B/s")
    return f"{said}; {row['text']}. Ceilings: {products} in {roof['dtype']}, {copies} copied."


def _cells(row: Row) -> tuple[str, ...]:
    name = row["name"]
    if row.get("failed"):
        return name, f"failed: {row['failed']}"
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


def _decode_cells(row: Row) -> tuple[str, ...]:
    if "decode" not in row:
        return ("",) * 6
    decode, inside = row["decode"], row["decoder"]
    launched = f"{decode['kernels']} ({decode['operations']})" if decode["kernels"] else f"({decode['operations']})"
    decoder = f"{inside['operations']}, {inside['bytes'] / 1024:,.0f}"
    speed = f"{decode['tokens_per_second']:,.1f}", _ms(decode["ms"]), f"{decode['share_of_floor']:.1%}"
    return *speed, launched, decoder, f"{row['cache']['bytes'] / 2**20:.3f}"


def _ms(found: Mapping[str, float]) -> str:
    return results.quartiles(found) if found["laps"] > 1 else f"{found['median']:.4g} (one run)"


# What rows say of each other.


def groups(rows: Rows) -> list[list[Row]]:
    """Rows that may be held against each other: of one protocol (and so one size), device, versions and sources, in
    which a name stands for one model alone."""
    found: dict[str, list[Row]] = {}
    given: dict[str, list[Any]] = {}  # what the name of a model has stood for so far
    for row in rows:
        key = json.dumps([row["protocol"], *mark(row)], sort_keys=True)
        known = given.setdefault(f"{key} {row['model']}", [])
        if row.get("given") not in known:
            known.append(row.get("given"))
        found.setdefault(f"{key} {known.index(row.get('given'))}", []).append(row)
    return list(found.values())


def find(rows: Rows, model: str, tokens: int, kind: str) -> Row | None:
    """The row of a case, unless it failed."""
    same = (r for r in rows if (r["model"], r["tokens"], r["kind"]) == (model, tokens, kind) and not r.get("failed"))
    return next(same, None)


def _showing(rows: Rows, model: str, tokens: int, what: str) -> Row | None:
    """The row that shows a model's prefill or decode: one whose prompt was read, else one of decode alone."""
    kinds = ("read",) if what == "prefill" else ("read", "decode")
    return next((row for kind in kinds if (row := find(rows, model, tokens, kind))), None)


def _done(rows: Rows, model: str, kind: str) -> list[Row]:
    return [row for row in rows if (row["model"], row["kind"]) == (model, kind) and not row.get("failed")]


def speed_up(ours: Row, other: Row, what: str, clock: str = "ms") -> float:
    """How many times as fast ``prefill`` or ``decode`` is: the ratio of the medians that the table shows."""
    return other[what][clock]["median"] / ours[what][clock]["median"]


def apart(ours: Row, other: Row) -> str:
    """What marks a ratio of rows that were measured one after the other."""
    return "" if ours["turn"] == other["turn"] else " (not in turns)"


def _faster(ours: Row, other: Row, what: str, by: str) -> tuple[str, str, str]:
    """How many times as fast, by the wall and in processor time, and the ratio of what has to be done."""
    if what not in ours or what not in other:
        return "", "", ""
    mine, theirs = ours[what], other[what]
    wall, own = (
        f"{speed_up(ours, other, what, clock):.2f}" if mine[clock] and theirs[clock] else ""
        for clock in ("ms", "processor_ms")
    )
    return wall, own, f"{theirs[by] / mine[by]:.2f}"


def against(rows: Rows) -> str:
    """The speed and cache of GSM, or where there is none of the first model, over those of every other one, at every
    length, beside what was to be expected."""
    names, cells = [row["model"] for row in rows], []
    leader = OURS if OURS in names else names[0]
    for row in rows:
        ours = find(rows, leader, row["tokens"], row["kind"])
        if row["model"] == leader or ours is None or row.get("failed") or row["kind"] == "unpruned":
            continue
        name = f"{row['model']}, {row['kind']}{apart(ours, row)}"
        kept = [f"{ours['cache'][name] / row['cache'][name]:.3f}" for name in ("bytes", "formula")]
        speed = *_faster(ours, row, "prefill", "flops"), *_faster(ours, row, "decode", "bytes")
        cells.append((name, short(row["tokens"]), *speed, *kept))
    return table((f"{NAMES.get(leader, leader)} against", *AGAINST), cells) if cells else ""


def pruning(rows: Rows) -> str:
    """What a pruned prefill gains over a forward that computes every row."""
    cells = []
    for row in rows:
        pruned = find(rows, row["model"], row["tokens"], "read")
        if row["kind"] == "unpruned" and not row.get("failed") and pruned:
            name = f"{row['model']}{apart(pruned, row)}"
            cells.append((name, short(row["tokens"]), *_faster(pruned, row, "prefill", "flops")))
    return table(PRUNING, cells) if cells else ""


def by_flops(rows: Rows) -> str:
    """One line: at how many lengths GSM's prefill is as much faster than the baseline's as it needs fewer FLOPs."""
    pairs = [(row, find(rows, "baseline", row["tokens"], "read")) for row in _done(rows, OURS, "read")]
    near = [
        abs(speed_up(ours, other, "prefill") / (other["prefill"]["flops"] / ours["prefill"]["flops"]) - 1)
        for ours, other in pairs
        if other
    ]
    if not near:
        return ""
    kept = sum(distance <= CLOSE for distance in near)
    found = f"at {kept} of {len(near)} lengths, {max(near):.1%} off at most"
    return results.verdict(f"prefill over baseline within {CLOSE:.0%} of the FLOP ratio", found, kept == len(near))


def growth(rows: Rows) -> str:
    """How decoding changes from the shortest to the longest length of a kind."""
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for kind in ("read", "decode"):
            same = sorted(_done(rows, model, kind), key=lambda row: row["tokens"])
            if len(same) > 1:
                cells.append(_grown(model, kind, same[0], same[-1]))
    return table(GROWTH, cells) if cells else ""


def _grown(model: str, kind: str, low: Row, high: Row) -> tuple[str, ...]:
    ratios = [
        high["decode"]["ms"]["median"] / low["decode"]["ms"]["median"],
        high["decoder"]["operations"] / low["decoder"]["operations"],
        high["decoder"]["bytes"] / low["decoder"]["bytes"],
        high["cache"]["bytes"] / low["cache"]["bytes"],
    ]
    states = [row["cache"]["parts"].get("shared_state") for row in (low, high)]
    state = " to ".join(dict.fromkeys(f"{size:,}" for size in states if size is not None))
    lengths = f"{'synthetic, ' * (kind == 'decode')}{short(low['tokens'])} to {short(high['tokens'])}"
    return model, lengths, *(f"{ratio:.3g}" for ratio in ratios), state


def _crossings(rows: Rows) -> str:
    """Where GSM gets ahead of the dense Transformer, a line each."""
    if not {OURS, "transformer"} <= {row["model"] for row in rows}:
        return ""
    return "\n".join(f"* {what}: {crossing(rows, 'transformer', what)}" for what in ("prefill", "decode"))


def crossing(rows: Rows, other: str, what: str) -> str:
    """Where GSM's prefill or decode becomes the faster one, and stays so as far as was measured: between two lengths,
    on a straight line in logarithms. Beyond what was measured, ``benchmark=projection`` computes it."""
    lead: dict[int, float] = {}  # below 1: GSM is faster
    for tokens in sorted({row["tokens"] for row in rows}):
        ours, theirs = (_showing(rows, model, tokens, what) for model in (OURS, other))
        if ours and theirs:
            lead[tokens] = 1 / speed_up(ours, theirs, what)
    if not lead:
        return "not measured"
    lengths, behind = list(lead), [tokens for tokens in lead if lead[tokens] >= 1]
    if not behind:
        return f"GSM is ahead of {other} at every length measured, from {lengths[0]:,} tokens"
    low = behind[-1]
    if low == lengths[-1]:
        return f"GSM is behind {other} at the longest length measured, {low:,} tokens"
    high = lengths[lengths.index(low) + 1]
    share = log(lead[low]) / (log(lead[low]) - log(lead[high]))
    tokens = exp(log(low) + share * (log(high) - log(low)))
    return f"GSM is ahead of {other} from about {tokens:,.0f} tokens (measured)"


def verdicts(rows: Rows) -> list[str]:
    """A line for each goal, where these rows are of the size that has goals: what was found, whether it is enough."""
    mine = [row for row in rows if row["protocol"]["size"] == SIZE and row["protocol"]["batch"] == 1]
    return [_verdict(goal, mine) for goal in GOALS] if mine else []


def _verdict(goal: Goal, rows: Rows) -> str:
    found = _measured(goal, rows)
    if found is None:
        return results.verdict(str(goal), None, False)
    row = _showing(rows, OURS, goal.tokens, "prefill") if goal.what == "prefill" else None
    share = f" ({row['prefill']['share_of_floor']:.0%} of the floor)" if row else ""
    met = found <= goal.least if goal.what in AT_MOST else found >= goal.least
    return results.verdict(str(goal), f"{found:,.4g}{share}", met)


def _measured(goal: Goal, rows: Rows) -> float | None:
    """What the rows show of a goal; None if that was not measured."""
    what, _, over = goal.what.partition(" over ")
    row = _showing(rows, OURS, goal.tokens, what)
    if row is None:
        return None
    if what == "kernels":
        return row["decode"]["kernels"]
    if what == "cache":
        return abs(row["cache"]["bytes"] / row["cache"]["formula"] - 1)
    speed = row[what]["tokens_per_second"]
    if not over:
        return speed
    if over == "baseline":
        other = _showing(rows, over, goal.tokens, what)
        return None if other is None else speed_up(row, other, what)
    other = _showing(rows, OURS, 4 * K, what)
    return None if other is None else speed / other[what]["tokens_per_second"]


# Pictures.


def value(row: Row, what: str) -> float:
    """Tokens a second of ``prefill`` or ``decode``, as in the table; MiB of the ``cache``."""
    return row["cache"]["bytes"] / 2**20 if what == "cache" else row[what]["tokens_per_second"]


def picture(rows: Rows) -> bytes:
    """A PNG of the paper's three panels, of rows that are alike; filled marks were measured on a prompt that was read.

    Raises ValueError if there is no request that was measured, ImportError if matplotlib is missing.
    """
    title = about(rows)
    rows = [row for row in rows if not row.get("failed") and row["kind"] in ("read", "decode")]
    if not rows:
        raise ValueError(f"{title}: there is no request that was measured, and so no picture")
    if any(row["synthetic"] for row in rows):
        title = f"{title}; open marks: after a synthetic memory"
    labels = {"prefill": "prefill (tokens/s)", "decode": "decode (tokens/s)", "cache": "cache (MiB)"}
    models, lengths = dict.fromkeys(row["model"] for row in rows), [row["tokens"] for row in rows]
    return panels(title, labels, models, lengths, partial(_draw, rows))


def _draw(rows: Rows, axes: Axes, what: str, model: str, style: Style) -> None:
    """One model: a line through all its lengths; where a prompt was read, that counts, and its mark is filled."""
    mine: Iterable[Row] = (row for row in rows if row["model"] == model and what in row)
    by_length = {row["tokens"]: row for row in sorted(mine, key=lambda row: not row.get("synthetic"))}
    points = sorted((tokens, value(row, what), row.get("synthetic")) for tokens, row in by_length.items())
    axes.plot([n for n, *_ in points], [y for _, y, _ in points], style.line, color=style.colour, linewidth=1.4)
    for tokens, y, synthetic in points:
        face = "white" if synthetic else style.colour
        axes.plot(tokens, y, style.marker, color=style.colour, markerfacecolor=face, markersize=4.5)


def computed(rows: Rows, path: Path) -> None:
    """Write what the cost model says with the measured points upon it, of single requests alone."""
    protocol, points = rows[0]["protocol"], []
    for row in rows:
        if "decode" in row:
            seconds = {
                f"{what}_seconds": row[what]["ms"]["median"] / 1e3 for what in ("prefill", "decode") if what in row
            }
            about = {"model": row["model"], "given": row.get("given"), "size": protocol["size"]}
            points.append({**about, "tokens": row["tokens"], **seconds, "cache_bytes": row["cache"]["bytes"]})
    if points and protocol["batch"] == 1:
        how = {"chunk": protocol["chunk"], "steps": protocol["steps"], "dtype": getattr(torch, protocol["dtype"])}
        path.write_bytes(projection.against(points, **how))
