"""What a file of inference results says about GSM: beside the others, with and without pruning, and as texts grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, log
from typing import Any, NamedTuple

from gsm.benchmarks.turns import short
from gsm_kernels.benchmark.report import table

OURS = "gsm"
AGAINST = (
    "GSM against", "tokens", "prefill, x as fast", "by processor time", "by FLOPs", "decode, x as fast",
    "by processor time", "by bytes", "cache, x", "by formula",
)  # fmt: skip
PRUNING = ("model", "tokens", "prefill, x its unpruned forward", "by processor time", "by FLOPs")
GROWTH = ("model", "decode", "ms a token, x", "decoder's operations, x", "decoder's bytes, x", "cache, x")

Row = Mapping[str, Any]
Rows = Sequence[Row]


class Crossing(NamedTuple):
    """Where GSM gets ahead of another model: at so many tokens (None: nowhere), and whether that was measured, or
    follows from the cost model beyond the longest length measured."""

    tokens: float | None
    measured: bool


def find(rows: Rows, model: str, tokens: int, kind: str) -> Row | None:
    """The row of a case, unless it failed."""
    same = (r for r in rows if (r["model"], r["tokens"], r["kind"]) == (model, tokens, kind) and not r.get("failed"))
    return next(same, None)


def against(rows: Rows) -> str:
    """GSM's speed and cache over those of every other model, at every length, beside what was to be expected."""
    cells = []
    for row in rows:
        ours = find(rows, OURS, row["tokens"], row["kind"])
        if row["model"] == OURS or ours is None or row.get("failed") or row["kind"] == "unpruned":
            continue
        cells.append((f"{row['model']}, {row['kind']}", short(row["tokens"]), *_ratios(ours, row)))
    return table(AGAINST, cells) if cells else ""


def pruning(rows: Rows) -> str:
    """What a pruned prefill gains over a forward that computes every row."""
    cells = []
    for row in rows:
        pruned = find(rows, row["model"], row["tokens"], "read")
        if row["kind"] == "unpruned" and not row.get("failed") and pruned:
            cells.append((row["model"], short(row["tokens"]), *_faster(pruned, row, "prefill", "flops")))
    return table(PRUNING, cells) if cells else ""


def growth(rows: Rows) -> str:
    """How decoding changes from the shortest to the longest length of a kind."""
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for kind in ("read", "decode"):
            same = sorted(_done(rows, model, kind), key=lambda row: row["tokens"])
            if len(same) > 1:
                cells.append(_grown(model, kind, same[0], same[-1]))
    return table(GROWTH, cells) if cells else ""


def crossing(rows: Rows, other: str, what: str, flops: Callable[[str, int], int], most: int = 1 << 24) -> Crossing:
    """Where GSM's prefill or decode becomes the faster one, and stays so.

    Between lengths that were measured: on a straight line in logarithms. Beyond the longest: each model's time goes on
    growing with its FLOPs as it did over its last two lengths.

    Args:
        rows: of one file.
        other: the model to be ahead of.
        what: ``prefill`` or ``decode``.
        flops: FLOPs of a model's prefill, or of a token, at a length.
        most: tokens, beyond which nothing is looked for.
    """
    ours, theirs = (_times(rows, model, what) for model in (OURS, other))
    lengths = sorted(ours.keys() & theirs.keys())
    lead = {n: ours[n] / theirs[n] for n in lengths}  # below 1: GSM is faster
    behind = [n for n in lengths if lead[n] >= 1]
    if len(lengths) < 2 or not behind:
        return Crossing(float(lengths[0]) if lengths else None, bool(lengths))
    last = behind[-1]
    if last != lengths[-1]:
        return Crossing(_between(last, lengths[lengths.index(last) + 1], lead), True)
    times = [_line(t, lengths[-2:], lambda n, model=m: flops(model, n)) for m, t in ((OURS, ours), (other, theirs))]
    tokens = lengths[-1]
    while tokens <= most and times[0](tokens) >= times[1](tokens):
        tokens = tokens * 9 // 8
    return Crossing(float(tokens) if tokens <= most else None, False)


def _between(low: int, high: int, lead: Mapping[int, float]) -> float:
    """Where the lead is 1 between two lengths."""
    share = log(lead[low]) / (log(lead[low]) - log(lead[high]))
    return exp(log(low) + share * (log(high) - log(low)))


def _line(times: Mapping[int, float], last: Sequence[int], flops: Callable[[int], int]) -> Callable[[int], float]:
    """A time that grows with the FLOPs, through the last two that were measured."""
    before, end = last
    slope = (times[end] - times[before]) / max(flops(end) - flops(before), 1)
    return lambda tokens: times[end] + max(slope, 0.0) * (flops(tokens) - flops(end))


def _times(rows: Rows, model: str, what: str) -> dict[int, float]:
    """Milliseconds by length; of a token in decode, after prompts that were read where there are both."""
    found: dict[int, float] = {}
    for kind in ("decode", "read"):
        found |= {row["tokens"]: row[what]["ms"]["median"] for row in _done(rows, model, kind) if what in row}
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
    clocks = [(mine.get(clock), theirs.get(clock)) for clock in ("ms", "processor_ms")]
    wall, own = (f"{b['median'] / a['median']:.2f}" if a and b else "" for a, b in clocks)
    return wall, own, f"{theirs[by] / mine[by]:.2f}"


def _grown(model: str, kind: str, low: Row, high: Row) -> tuple[str, ...]:
    ratios = [
        high["decode"]["ms"]["median"] / low["decode"]["ms"]["median"],
        high["decoder"]["operations"] / low["decoder"]["operations"],
        high["decoder"]["bytes"] / low["decoder"]["bytes"],
        high["cache"]["bytes"] / low["cache"]["bytes"],
    ]
    origin = "synthetic, " if kind == "decode" else ""
    return model, f"{origin}{short(low['tokens'])} to {short(high['tokens'])}", *(f"{ratio:.3g}" for ratio in ratios)
