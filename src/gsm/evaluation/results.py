"""Results that are kept while they are measured, so that a measure that was interrupted goes on where it was; and arms
side by side: means over seeds, differences with their intervals."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gsm.evaluation.bootstrap import paired
from gsm.files import read_json, replacing

SAVE_EVERY = 20.0  # seconds
Grid = list[list[str]]  # rows of cells, the names of the columns first
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]  # passes so many parts on, and may say how far it is
ACCURACIES = ("acc", "acc_norm")  # of the metrics of a task, those that are shares of right answers


def silent(parts: Iterable[Any], count: int, note: str = "") -> Iterable[Any]:
    """The progress that says nothing."""
    return parts


class Results:
    """The cells of one measure of one model, in a JSON file.

    A file of the same settings is gone on from; another one is moved to ``<name>.previous``.

    Args:
        path: of the file; None: nothing is kept.
        settings: all that the numbers depend on, as plain containers.

    Attributes:
        settings: as they come back from JSON.
        cells: what was found so far, by name (in JSON a text).
        conclusion: what was saved with the cells, unless cells came since.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = Path(path) if path else None, json.loads(json.dumps(settings))
        self.conclusion = self._known(self.path) if self.path and self.path.exists() else {}
        self.cells: dict[Any, Any] = self.conclusion.pop("cells", {})

    def fill(
        self,
        parts: Iterable[Any],
        names: Callable[[Any], Iterable[Hashable]],
        compute: Callable[[Any], Mapping[Any, Any]],
        progress: Progress = silent,
    ) -> None:
        """Computes what is missing, and saves it: every ``SAVE_EVERY`` seconds, in the end, and when it is interrupted.

        Args:
            parts: what is computed at a time.
            names: of the cells of a part.
            compute: the cells of a part, by name.
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
        """Writes the file, with what follows from the cells. Raises OSError."""
        self.conclusion = conclusion
        if self.path:
            write_lines(self.path, self.content())

    def content(self) -> dict[str, Any]:
        """What the file holds."""
        return {"settings": self.settings, "cells": self.cells, **self.conclusion}

    def _known(self, path: Path) -> dict[str, Any]:
        """What a file of the same settings holds besides these; any other one is moved."""
        content = read_json(path) or {}
        before, now = content.pop("settings", None), self.settings
        if isinstance(before, dict) and isinstance(content.get("cells"), dict):
            changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            if not changed:
                return content
            why = f"it was made with another {', '.join(changed)}"
        else:  # nothing that can be gone on from
            why = "it is damaged, or something else"
        previous = path.with_suffix(".previous")
        os.replace(path, previous)
        print(f"{path.name} is begun anew: {why}; the old one is now {previous}", flush=True)
        return {}


def by_arm(
    results: Sequence[Mapping[str, Any]], run: Callable[[Any], Mapping[str, Any]] = lambda result: result
) -> dict[str, dict[Any, Any]]:
    """Results by arm and seed, in their order; arms with their experiment in front where there are several of these. A
    second run of the same arm and seed counts as another seed.

    Args:
        results: of single runs.
        run: what says ``experiment``, ``arm`` and ``seed`` of one.
    """
    runs = [run(result) for result in results]
    several = len({one["experiment"] for one in runs}) > 1
    arms: dict[str, dict[Any, Any]] = {}
    for one, result in zip(runs, results, strict=True):
        seeds = arms.setdefault(f"{one['experiment']}/{one['arm']}" if several else one["arm"], {})
        seeds[one["seed"] if one["seed"] not in seeds else (one["seed"], len(seeds))] = result
    return arms


def cell(values: Iterable[float | None], digits: int = 2) -> str:
    """``98.33``, with the sample standard deviation over several ``98.33 +- 1.67``; ``-`` for none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" +- {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{spread}"


def side_by_side(
    title: str,
    arms: Mapping[str, Mapping[Any, Any]],
    rows: Mapping[str, str],
    value: Callable[[Any, str], float | None],
    columns: Sequence[str] = (),
    theirs: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Grid:
    """Rows by arms: mean and standard deviation over the results of each, and then others' numbers.

    Args:
        title: of the rows.
        arms: results, by arm and seed.
        rows: their names, and what they are called.
        value: of a result in a row.
        columns: of the others.
        theirs: by row, their numbers; none: ``-``.
    """
    grid = [[title, *arms, *columns]]
    for name, label in rows.items():
        numbers = [f"{number:.2f}" for number in theirs.get(name, ())] or ["-"] * len(columns)
        grid.append([label, *(cell(value(one, name) for one in seeds.values()) for seeds in arms.values()), *numbers])
    return grid


def transposed(grid: Grid) -> Grid:
    """Columns as rows."""
    return [list(column) for column in zip(*grid, strict=True)]


def difference(
    first: Mapping[Any, Any],
    second: Mapping[Any, Any],
    scores: Callable[[list[Any]], Mapping[str, Sequence[float]]],
    alike: Callable[[list[Any]], bool] = lambda results: True,
) -> str:
    """Second arm minus first over the seeds that both have, with the interval of the paired bootstrap over questions;
    ``-`` where there is no such seed.

    Args:
        first, second: results of an arm by seed.
        scores: by task, the score of every question: of several results their mean.
        alike: whether results answer the same questions; if not: ``-``.
    """
    seeds = [seed for seed in first if seed in second]
    one, other = ([arm[seed] for seed in seeds] for arm in (first, second))
    return str(paired(scores(one), scores(other))) if seeds and alike([*one, *other]) else "-"


def means(runs: Iterable[Sequence[float]]) -> list[float]:
    """The mean of several lists, element by element."""
    return [statistics.fmean(values) for values in zip(*runs, strict=True)]


def conclude(metrics: Sequence[str], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of a task: means over all samples, which for a task with subtasks weighs these by their samples.

    Returns:
        Each metric; ``samples``; ``cut``, how many of them were cut; and ``subtasks``, each with ``samples`` and its
        accuracies.
    """
    subtasks: dict[str, list[Mapping[str, Any]]] = {}
    for one in records:
        subtasks.setdefault(one["subtask"], []).append(one)
    found: dict[str, Any] = {metric: _mean(metric, records) for metric in metrics}
    found |= {"samples": len(records), "cut": sum(one["cut"] > 0 for one in records)}
    if set(subtasks) != {""}:
        accuracies = [metric for metric in metrics if metric in ACCURACIES]
        found["subtasks"] = {
            name: {"samples": len(those), **{metric: _mean(metric, those) for metric in accuracies}}
            for name, those in sorted(subtasks.items())
        }
    return found


def finish(results: Results, metrics: Sequence[str], records: Sequence[Mapping[str, Any]]) -> None:
    """Saves the records of all samples, with the scores of the task, in place of the cells that they were made of."""
    results.cells.clear()
    results.save(scores=conclude(metrics, records), samples=records)


def _mean(metric: str, records: Sequence[Mapping[str, Any]]) -> float:
    """A mean over samples; of perplexity the exponential of the mean negative log-likelihood of whole continuations."""
    if metric == "perplexity":
        return math.exp(min(700.0, -statistics.fmean(one["loglikelihoods"][one["gold"]] for one in records)))
    return statistics.fmean(one[metric] for one in records)


def write_lines(file: Path, content: Mapping[str, Any]) -> None:
    """JSON with a line for each cell and each sample, the file as a whole or not at all. Raises OSError."""

    def entry(value: Any) -> str:
        if isinstance(value, dict):
            return (
                "{\n"
                + ",\n".join(f"    {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items())
                + "\n  }"
            )
        if isinstance(value, list):
            return "[\n" + ",\n".join(f"    {json.dumps(one)}" for one in value) + "\n  ]"
        return json.dumps(value)

    lines = ",\n".join(f"  {json.dumps(name)}: {entry(value)}" for name, value in content.items())
    with replacing(file) as opened:
        opened.write(f"{{\n{lines}\n}}\n".encode())
