"""What inference is to reach on a Hopper GPU at the paper's 1.5B scale, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gsm.benchmarks.comparisons import OURS, Row, Rows, find, speed_up
from gsm.benchmarks.turns import short

SIZE = "1p5b"
K = 1024


class Goal(NamedTuple):
    """GSM is to reach ``least`` at so many tokens: tokens/s in ``prefill`` or ``decode``; times the baseline's in
    ``prefill over baseline``; a share of its speed at 4K in ``decode over 4K``; ``kernels`` a token, and the distance
    of the ``cache`` from its formula, at most."""

    tokens: int
    what: str
    least: float
    level: Literal["must", "aim"]


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


def verdicts(rows: Rows) -> list[str]:
    """A line for each goal, where these rows are of the size that has goals: what was found, whether it is enough."""
    mine = [row for row in rows if row["protocol"]["size"] == SIZE and row["protocol"]["batch"] == 1]
    return [_verdict(goal, mine) for goal in GOALS] if mine else []


def measured(goal: Goal, rows: Rows) -> float | None:
    """What the rows show of a goal; None if that was not measured."""
    row = _row(rows, OURS, goal.tokens, goal.what.partition(" ")[0])
    if row is None:
        return None
    if goal.what == "kernels":
        return row["decode"]["kernels"]
    if goal.what == "cache":
        return abs(row["cache"]["bytes"] / row["cache"]["formula"] - 1)
    what, _, over = goal.what.partition(" over ")
    speed = row[what]["tokens_per_second"]
    if not over:
        return speed
    if over == "baseline":
        other = _row(rows, over, goal.tokens, what)
        return None if other is None else speed_up(row, other, what)
    other = _row(rows, OURS, 4 * K, what)
    return None if other is None else speed / other[what]["tokens_per_second"]


def _row(rows: Rows, model: str, tokens: int, what: str) -> Row | None:
    """The row that shows something: one whose prompt was read, else one of decode alone."""
    kinds: Sequence[str] = ("read",) if what == "prefill" else ("read", "decode")
    return next((row for kind in kinds if (row := find(rows, model, tokens, kind))), None)


def _verdict(goal: Goal, rows: Rows) -> str:
    found, at_most = measured(goal, rows), goal.what in AT_MOST
    unit = {"prefill": " tokens/s", "decode": " tokens/s", "cache": " from the formula"}.get(goal.what, "")
    wanted = f"{goal.level} {short(goal.tokens)} {goal.what}: {'at most ' if at_most else ''}{goal.least:,g}{unit}"
    if found is None:
        return f"{wanted}: not measured"
    met = found <= goal.least if at_most else found >= goal.least
    row = _row(rows, OURS, goal.tokens, "prefill") if goal.what == "prefill" else None
    share = f" ({row['prefill']['share_of_floor']:.0%} of the floor)" if row else ""
    return f"{wanted}: {found:,.4g}{share}, {'met' if met else 'missed'}"
