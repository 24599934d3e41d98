"""Results that are saved while they are measured, so that an interrupted measure goes on; and results of arms in one
table: means over seeds, differences with their intervals."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gsm.files import read_json, write_json
from gsm.intervals import over_questions, over_seeds
from gsm.tables import Grid

SAVE_EVERY = 20.0  # seconds
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]  # passes this number of parts on, and may report them


def silent(parts: Iterable[Any], count: int, note: str = "") -> Iterable[Any]:
    """Return the parts, and report nothing."""
    return parts


class Results:
    """The cells of one measure of one model, in a JSON file.

    A file of the same settings is continued. Another file is moved to ``<name>.previous`` by the first ``save``, so
    that a refused measure leaves it in place.

    Args:
        path: of the file; None: nothing is saved.
        settings: everything that the numbers depend on, as plain containers.

    Attributes:
        settings: as they come back from JSON.
        cells: values by name (in JSON a text).
        conclusion: the rest of the file, unless cells came since.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = Path(path) if path else None, json.loads(json.dumps(settings))
        self._outdated = ""  # the reason why the existing file cannot be continued
        self.conclusion = self._saved(self.path) if self.path and self.path.exists() else {}
        self.cells: dict[Any, Any] = self.conclusion.pop("cells", {})

    def fill(
        self,
        parts: Iterable[Any],
        names: Callable[[Any], Iterable[Hashable]],
        compute: Callable[[Any], Mapping[Any, Any]],
        progress: Progress = silent,
    ) -> None:
        """Compute the missing cells, and save them every ``SAVE_EVERY`` seconds, at the end, and at an interruption.

        Args:
            parts: the units of computation.
            names: returns the names of the cells of a part.
            compute: returns the cells of a part, by name.
            progress: passes on the parts that are left.
        """
        left = [part for part in parts if any(name not in self.cells for name in names(part))]
        self.conclusion, saved = {} if left else self.conclusion, time.monotonic()
        try:
            for part in progress(left, len(left), ""):
                self.cells |= compute(part)
                if time.monotonic() - saved > SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()
        finally:  # above all with KeyboardInterrupt: it costs the part that it came in
            if left and self.cells:
                self.save()

    def save(self, **conclusion: Any) -> None:
        """Write the file, with a conclusion from the cells. Raises OSError."""
        self.conclusion = conclusion
        if self.path and self._outdated:
            previous = self.path.with_suffix(".previous")
            os.replace(self.path, previous)
            print(f"{self.path.name} begins again: {self._outdated}; the old one is now {previous}", flush=True)
            self._outdated = ""
        if self.path:
            write_json(self.path, self.content())

    def content(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"settings": self.settings, "cells": self.cells, **self.conclusion}

    def _saved(self, path: Path) -> dict[str, Any]:
        """Return the content of a file but for its settings; nothing where the settings differ."""
        content = read_json(path) or {}
        before, now = content.pop("settings", None), self.settings
        if not (isinstance(before, dict) and isinstance(content.get("cells"), dict)):
            self._outdated = "it is damaged, or something else"
            return {}
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        self._outdated = f"it was made with another {', '.join(changed)}" if changed else ""
        return {} if changed else content


def by_arm(
    results: Sequence[Mapping[str, Any]], run: Callable[[Any], Mapping[str, Any]] = lambda result: result
) -> dict[str, dict[Any, Any]]:
    """Return results by arm and seed, in their order.

    Arms of several experiments have the experiment's name in front. A second run of the same arm and seed counts as
    another seed.

    Args:
        results: of single runs.
        run: returns ``experiment``, ``arm`` and ``seed`` of a result.
    """
    runs = [run(result) for result in results]
    several = len({facts["experiment"] for facts in runs}) > 1
    arms: dict[str, dict[Any, Any]] = {}
    for facts, result in zip(runs, results, strict=True):
        seeds = arms.setdefault(f"{facts['experiment']}/{facts['arm']}" if several else facts["arm"], {})
        seeds[facts["seed"] if facts["seed"] not in seeds else (facts["seed"], len(seeds))] = result
    return arms


def side_by_side(
    title: str,
    arms: Mapping[str, Mapping[Any, Any]],
    rows: Mapping[str, str],
    value: Callable[[Any, str], float | None],
    columns: Sequence[str] = (),
    published: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Grid:
    """Return rows by arms: mean and standard deviation over the results of each, then published numbers.

    Args:
        title: of the rows.
        arms: results, by arm and seed.
        rows: their names, and their titles.
        value: of a result in a row.
        columns: of the published numbers.
        published: by row, numbers for these columns; none: ``-``.
    """
    grid = [[title, *arms, *columns]]
    for name, label in rows.items():
        cells = [over_seeds(value(result, name) for result in seeds.values()).text(2) for seeds in arms.values()]
        grid.append([label, *cells, *([f"{score:.2f}" for score in published.get(name, ())] or ["-"] * len(columns))])
    return grid


def difference(
    first: Mapping[Any, Any],
    second: Mapping[Any, Any],
    scores: Callable[[list[Any]], Mapping[str, Sequence[float]]],
    comparable: Callable[[list[Any]], bool] = lambda results: True,
) -> str:
    """Return the second arm minus the first over their common seeds, with the interval of the paired bootstrap over
    questions; ``-`` without a common seed.

    Args:
        first, second: results of an arm by seed.
        scores: returns by task the score of every question, for several results their mean.
        comparable: whether results answer the same questions; if not: ``-``.
    """
    seeds = [seed for seed in first if seed in second]
    ours, theirs = ([arm[seed] for seed in seeds] for arm in (first, second))
    if not seeds or not comparable([*ours, *theirs]):
        return "-"
    return over_questions(scores(ours), scores(theirs)).text()


def means(runs: Iterable[Sequence[float]]) -> list[float]:
    """Return the mean of several lists, element by element."""
    return [statistics.fmean(values) for values in zip(*runs, strict=True)]
