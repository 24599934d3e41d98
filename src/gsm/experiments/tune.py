"""Grids of values that arms are tuned over: what is to be tried next, and what has won.

Every combination is tried. Where the best one stands at the edge of a grid of numbers, that grid grows by one value, by
the ratio of its last two, and the search goes on; so its end follows from the results alone, and is the same after any
interruption. What a result is, and where it is kept, ``gsm.experiments.trials`` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from gsm.experiments.asked import quoted

EDGE = " (edge)"  # behind a value in a table
Values = dict[str, Any]  # a value for each key
Grids = dict[str, list[Any]]


@dataclass(frozen=True)
class Choice:
    """What has won.

    Attributes:
        values: by key.
        grids: all values that were tried, by key.
        cost: the mean over the seeds, lower is better; infinite where none came to its end.
    """

    values: Values
    grids: Grids
    cost: float = 0.0

    @property
    def found(self) -> bool:
        """Whether anything came to its end."""
        return math.isfinite(self.cost)

    def at_edge(self, key: str) -> bool:
        """Whether the value stands at the end of what was tried, so that a better one may lie beyond."""
        return edge(self.grids[key], self.values[key]) is not None

    def shown(self) -> dict[str, str]:
        """The values as cells of a table, those at an edge marked."""
        return {key: f"{quoted(value)}{EDGE if self.at_edge(key) else ''}" for key, value in self.values.items()}

    def plain(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            key: {"value": self.values[key], "edge": self.at_edge(key), "tried": self.grids[key], "shown": shown}
            for key, shown in self.shown().items()
        }


def search(
    grids: Mapping[str, Sequence[Any]],
    cost: Callable[[Values], float | None],
    possible: Callable[[Values], bool],
    grow: int,
) -> tuple[list[Values], Choice | None]:
    """What has to be tried next, or if nothing has, what has won.

    Args:
        grids: the values to begin with.
        cost: of a combination, lower is better; None: it was not tried yet.
        possible: whether a combination that was not asked for can be tried.
        grow: how often each grid may grow.
    """
    tried: Grids = {key: list(values) for key, values in grids.items()}
    grown, stuck = Counter[str](), set[tuple[str, int]]()
    while True:
        found = [(cost(values), values) for values in combinations(tried)]
        missing = [values for known, values in found if known is None]
        if missing:
            return missing, None
        least, best = min(((known, values) for known, values in found if known is not None), key=_rank)
        more: Grids = {}
        for key, values in tried.items():
            side = edge(values, best[key])
            further = None if side is None or grown[key] == grow or (key, side) in stuck else beyond(values, side)
            if further is not None and possible({**best, key: further}):
                more[key] = [further]
                grown[key] += 1
            elif side is not None:
                stuck.add((key, side))
        if not more:
            return [], Choice(best, tried, least)
        tried = {key: values + more.get(key, []) for key, values in tried.items()}


def _rank(one: tuple[float, Values]) -> tuple[float, list[float]]:
    """The order of what was tried: by its cost, and where nothing came to its end, lower numbers first."""
    cost, values = one
    return cost, [] if math.isfinite(cost) else [value for value in values.values() if _is_number(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def combinations(grids: Mapping[str, Sequence[Any]]) -> list[Values]:
    """A value of each grid, in every combination; one without a value where there is no grid."""
    return [dict(zip(grids, values, strict=True)) for values in product(*grids.values())]


def edge(values: Sequence[Any], value: Any) -> int | None:
    """At which end a value stands: -1 the lowest, 1 the highest; None for one inside, of one, or of words."""
    if len(values) < 2 or not all(map(_is_number, values)):
        return None
    return {min(values): -1, max(values): 1}.get(value)


def beyond(values: Sequence[Any], side: int) -> int | float | None:
    """The next value behind an end, by the ratio of the two that stand there; None where there is none."""
    last, before = sorted(values, reverse=side > 0)[:2]
    if last <= 0 or before <= 0:
        return None
    further = last * (last / before)
    further = round(further) if all(isinstance(one, int) for one in values) else float(f"{further:.3g}")
    return further if math.isfinite(further) and further > 0 and further not in values else None
