"""What a file of inference results says about GSM: beside the others, with and without pruning, and as texts grow.

All of it is said of rows that are alike (``groups``): of one protocol, commit and device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import exp, log
from statistics import median
from typing import Any, Literal, NamedTuple

from gsm.benchmarks.turns import short
from gsm_kernels.benchmark.report import table
from gsm_kernels.benchmark.results import mark

OURS = "gsm"
AGAINST = (
    "GSM against", "tokens", "prefill, x as fast", "by processor time", "by FLOPs", "decode, x as fast",
    "by processor time", "by bytes", "cache, x", "by formula",
)  # fmt: skip
PRUNING = ("model", "tokens", "prefill, x its unpruned forward", "by processor time", "by FLOPs")
GROWTH = (
    "model", "decode", "ms a token, x", "decoder's operations, x", "decoder's bytes, x", "cache, x",
    "shared state, bytes",
)  # fmt: skip
CLOSE = 0.15  # of the ratio of FLOPs, which a ratio of prefill times is to come as near as

Row = Mapping[str, Any]
Rows = Sequence[Row]


class Crossing(NamedTuple):
    """Where GSM gets ahead of another model.

    Attributes:
        tokens: the length; None: nowhere, as far as was looked.
        how: ``everywhere``: ahead at every length measured, of which that is the first; ``between`` two that were
            measured; ``beyond`` the longest one, by the cost model; ``behind`` at the one length measured.
    """

    tokens: float | None
    how: Literal["everywhere", "between", "beyond", "behind"]


def groups(rows: Rows) -> list[list[Row]]:
    """Rows that may be held against each other: of one protocol (and so one size), device, versions and sources."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        key = json.dumps([row["protocol"], *mark(row)], sort_keys=True)
        found.setdefault(key, []).append(row)
    return list(found.values())


def find(rows: Rows, model: str, tokens: int, kind: str) -> Row | None:
    """The row of a case, unless it failed."""
    same = (r for r in rows if (r["model"], r["tokens"], r["kind"]) == (model, tokens, kind) and not r.get("failed"))
    return next(same, None)


def speed_up(ours: Row, other: Row, what: str, clock: str = "ms") -> float:
    """How many times as fast ``prefill`` or ``decode`` is: the median of the ratios run by run, where the runs of both
    alternated; else the ratio of medians."""
    mine, theirs = ours[what][clock], other[what][clock]
    if _apart(ours, other):
        return theirs["median"] / mine["median"]
    return median(b / a for a, b in zip(mine["each"], theirs["each"], strict=False))  # one may have had fewer runs


def against(rows: Rows) -> str:
    """GSM's speed and cache over those of every other model, at every length, beside what was to be expected."""
    cells = []
    for row in rows:
        ours = find(rows, OURS, row["tokens"], row["kind"])
        if row["model"] == OURS or ours is None or row.get("failed") or row["kind"] == "unpruned":
            continue
        name = f"{row['model']}, {row['kind']}{_apart(ours, row)}"
        cells.append((name, short(row["tokens"]), *_ratios(ours, row)))
    return table(AGAINST, cells) if cells else ""


def pruning(rows: Rows) -> str:
    """What a pruned prefill gains over a forward that computes every row."""
    cells = []
    for row in rows:
        pruned = find(rows, row["model"], row["tokens"], "read")
        if row["kind"] == "unpruned" and not row.get("failed") and pruned:
            name = f"{row['model']}{_apart(pruned, row)}"
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
    verdict = "met" if kept == len(near) else "missed"
    return (
        f"prefill over baseline within {CLOSE:.0%} of the FLOP ratio: at {kept} of {len(near)} lengths, "
        f"{max(near):.1%} off at most, {verdict}"
    )


def growth(rows: Rows) -> str:
    """How decoding changes from the shortest to the longest length of a kind."""
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for kind in ("read", "decode"):
            same = sorted(_done(rows, model, kind), key=lambda row: row["tokens"])
            if len(same) > 1:
                cells.append(_grown(model, kind, same[0], same[-1]))
    return table(GROWTH, cells) if cells else ""


def crossing(
    rows: Rows, other: str, what: str, flops: Callable[[str, int], int], most: int = 1 << 24
) -> Crossing | None:
    """Where GSM's prefill or decode becomes the faster one, and stays so; None: at no length were both measured.

    Between lengths that were measured: on a straight line in logarithms. Beyond the longest: each model's time goes on
    growing with its FLOPs as it did over its last two lengths.

    Args:
        rows: that are alike.
        other: the model to be ahead of.
        what: ``prefill`` or ``decode``.
        flops: FLOPs of a model's prefill, or of a token, at a length.
        most: tokens, beyond which nothing is looked for.
    """
    ours, theirs = (_that_show(rows, model, what) for model in (OURS, other))
    lengths = sorted(ours.keys() & theirs.keys())
    lead = {n: 1 / speed_up(ours[n], theirs[n], what) for n in lengths}  # below 1: GSM is faster
    behind = [n for n in lengths if lead[n] >= 1]
    if not behind:
        return Crossing(float(lengths[0]), "everywhere") if lengths else None
    last = behind[-1]
    if last != lengths[-1]:
        return Crossing(_between(last, lengths[lengths.index(last) + 1], lead), "between")
    if len(lengths) == 1:
        return Crossing(float(last), "behind")
    ends = [{n: shown[n][what]["ms"]["median"] for n in lengths[-2:]} for shown in (ours, theirs)]
    times = [_line(end, partial(flops, model)) for model, end in zip((OURS, other), ends, strict=True)]
    tokens = lengths[-1]
    while tokens <= most and times[0](tokens) >= times[1](tokens):
        tokens = max(tokens + 1, tokens * 9 // 8)
    return Crossing(float(tokens) if tokens <= most else None, "beyond")


def _apart(ours: Row, other: Row) -> str:
    """What marks a ratio of rows that were measured one after the other."""
    return "" if ours["turn"] == other["turn"] else " (not in turns)"


def _between(low: int, high: int, lead: Mapping[int, float]) -> float:
    """Where the lead is 1 between two lengths."""
    share = log(lead[low]) / (log(lead[low]) - log(lead[high]))
    return exp(log(low) + share * (log(high) - log(low)))


def _line(times: Mapping[int, float], flops: Callable[[int], int]) -> Callable[[int], float]:
    """A time that grows with the FLOPs, through two that were measured, of which the second is the longer text's."""
    before, end = times
    slope = (times[end] - times[before]) / max(flops(end) - flops(before), 1)
    return lambda tokens: times[end] + max(slope, 0.0) * (flops(tokens) - flops(end))


def _that_show(rows: Rows, model: str, what: str) -> dict[int, Row]:
    """Rows by length that show a model's prefill or decode; after prompts that were read where there are both."""
    found: dict[int, Row] = {}
    for kind in ("decode", "read"):
        found |= {row["tokens"]: row for row in _done(rows, model, kind) if what in row}
    return found


def _done(rows: Rows, model: str, kind: str) -> Iterator[Row]:
    return (row for row in rows if (row["model"], row["kind"]) == (model, kind) and not row.get("failed"))


def _ratios(ours: Row, other: Row) -> tuple[str, ...]:
    cache = ("bytes", "formula")
    kept = [f"{ours['cache'][name] / other['cache'][name]:.3f}" for name in cache]
    return *_faster(ours, other, "prefill", "flops"), *_faster(ours, other, "decode", "bytes"), *kept


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


def _grown(model: str, kind: str, low: Row, high: Row) -> tuple[str, ...]:
    ratios = [
        high["decode"]["ms"]["median"] / low["decode"]["ms"]["median"],
        high["decoder"]["operations"] / low["decoder"]["operations"],
        high["decoder"]["bytes"] / low["decoder"]["bytes"],
        high["cache"]["bytes"] / low["cache"]["bytes"],
    ]
    states = [row["cache"]["parts"].get("shared_state") for row in (low, high)]
    state = " to ".join(dict.fromkeys(f"{size:,}" for size in states if size is not None))
    origin = "synthetic, " if kind == "decode" else ""
    lengths = f"{origin}{short(low['tokens'])} to {short(high['tokens'])}"
    return model, lengths, *(f"{ratio:.3g}" for ratio in ratios), state
