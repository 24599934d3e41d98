"""Tables of runs: their summaries read, put together over seeds, and shown, for experiments and for notebooks alike.

from gsm.experiments.table import read_runs, summarise

print(summarise(read_runs("logs/ablate_residual"), ["bits_per_byte", "data.train_tokens"]).text())
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gsm.files import read_json

COLUMNS = ("bits_per_byte", "val_loss")
WIDTH = 100
FOOTNOTE = (
    "mean +- sample standard deviation over the seeds; of differences, mean +- standard error over the seeds that both "
    "arms have"
)


@dataclass(frozen=True)
class RunSummary:
    """One run: which it is, where it lies, and what its ``summary.json`` holds."""

    arm: str
    seed: int
    folder: Path
    summary: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.summary.get("status") == "finished"

    def value(self, column: str) -> float | None:
        """A finite number of the summary; dots go down, as in ``data.train_tokens``. None where there is none."""
        found: Any = self.summary
        for part in column.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        return float(found) if is_number and math.isfinite(found) else None


@dataclass(frozen=True)
class Cell:
    """One column of one arm: mean and sample standard deviation over the ``count`` seeds that have a value."""

    count: int = 0
    mean: float | None = None
    spread: float | None = None

    def __str__(self) -> str:
        if self.mean is None:
            return "-"
        if self.spread is None:
            return shown(self.mean)
        return f"{shown(self.mean)} +- {shown(self.spread, like=self.mean)}"


@dataclass(frozen=True)
class Difference:
    """One column of an arm minus that of the first arm, seed by seed: its mean and standard error.

    Runs of one seed see the same data in the same order: what a seed does to both of them is gone from the difference.

    Attributes:
        count: how many seeds have both values.
        error: standard error of the mean, None for a single seed.
        like: the size of the values themselves, which decides how many digits are shown.
    """

    count: int = 0
    mean: float | None = None
    error: float | None = None
    like: float | None = field(default=None, repr=False)

    def __str__(self) -> str:
        if self.mean is None:
            return "-"
        number = f"{'-' if self.mean < 0 else '+'}{shown(abs(self.mean), like=self.like)}"
        return number if self.error is None else f"{number} +- {shown(self.error, like=self.like)}"


@dataclass(frozen=True)
class Row:
    """One arm: its number of runs, a cell for each column, and each seed's value of the first column."""

    arm: str
    runs: int
    cells: dict[str, Cell]
    seeds: dict[int, float | None]


@dataclass(frozen=True)
class Table:
    """Arms and columns, and the runs that they were made from."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    runs: tuple[RunSummary, ...] = field(repr=False)

    def text(self, width: int = WIDTH) -> str:
        """Plain ASCII; what is wider than ``width`` characters goes on below, under its arms again."""
        return "\n\n".join(grid_text(grid, width) for grid in self._grids())

    def markdown(self) -> str:
        """The same as tables in Markdown."""
        return "\n\n".join(map(grid_markdown, self._grids())) + "\n"

    def csv(self) -> str:
        """One line for each run, with numbers in full."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["arm", "seed", *self.columns])
        for run in self.runs:
            writer.writerow([run.arm, run.seed, *(run.value(column) for column in self.columns)])
        return text.getvalue()

    def plain(self) -> dict[str, Any]:
        """The same as containers, for JSON: ``arms``, by name, with ``columns`` and ``seeds``."""
        arms = {
            row.arm: {
                "runs": row.runs,
                "columns": {name: vars(cell) for name, cell in row.cells.items()},
                "seeds": {
                    str(run.seed): {column: run.value(column) for column in self.columns}
                    for run in self.runs
                    if run.arm == row.arm
                },
            }
            for row in self.rows
        }
        differences = {
            arm: {
                name: {"count": found.count, "mean": found.mean, "standard_error": found.error}
                for name, found in columns.items()
            }
            for arm, columns in self.differences().items()
        }
        return {
            "columns": list(self.columns),
            "spread": "sample standard deviation over seeds",
            "arms": arms,
            "differences": {"to": self.rows[0].arm if self.rows else None, "arms": differences},
        }

    def differences(self) -> dict[str, dict[str, Difference]]:
        """Every other arm minus the first, column by column, over the seeds that both have."""
        values = {(run.arm, run.seed, column): run.value(column) for run in self.runs for column in self.columns}
        seeds = sorted({run.seed for run in self.runs})
        return {
            row.arm: {
                column: _difference(
                    [
                        (values.get((row.arm, seed, column)), values.get((self.rows[0].arm, seed, column)))
                        for seed in seeds
                    ]
                )
                for column in self.columns
            }
            for row in self.rows[1:]
        }

    def empty_columns(self) -> list[str]:
        """Columns that no run has a value for, though there are runs."""
        return [c for c in self.columns if self.runs and all(row.cells[c].count == 0 for row in self.rows)]

    def _grids(self) -> list[list[list[str]]]:
        """Means over seeds; where there are several seeds, also the first column seed by seed, and differences."""
        first = [["arm", "runs", *self.columns]]
        first += [[row.arm, str(row.runs), *(str(row.cells[column]) for column in self.columns)] for row in self.rows]
        seeds = sorted({run.seed for run in self.runs})
        if len(seeds) < 2:
            return [first]
        second = [[self.columns[0], *(f"seed {seed}" for seed in seeds)]]
        second += [[row.arm, *(shown(row.seeds.get(seed)) for seed in seeds)] for row in self.rows]
        return [first, second, *self._paired()]

    def _paired(self) -> list[list[list[str]]]:
        """The differences as a grid, where two arms share two seeds or more."""
        counts = {arm: max(found.count for found in columns.values()) for arm, columns in self.differences().items()}
        if max(counts.values(), default=0) < 2:
            return []
        grid = [[f"minus {self.rows[0].arm}", "seeds", *self.columns]]
        for arm, columns in self.differences().items():
            grid.append([arm, str(counts[arm]), *(str(columns[column]) for column in self.columns)])
        return [grid]


def read_runs(folder: str | os.PathLike[str]) -> list[RunSummary]:
    """The runs below ``logs/<name>``, finished or not, by arm and seed; a summary that cannot be read is left out."""
    found = []
    for file in sorted(Path(folder).glob("*/seed*/summary.json")):
        number = re.fullmatch(r"seed(-?\d+)", file.parent.name)
        summary = read_json(file)
        if number and summary is not None:
            found.append(RunSummary(file.parent.parent.name, int(number[1]), file.parent, summary))
    return sorted(found, key=lambda run: (run.arm, run.seed))


def summarise(
    runs: Iterable[RunSummary], columns: Sequence[str] = COLUMNS, arms: Collection[str] | None = None
) -> Table:
    """Puts finished runs together, arm by arm; the others are left out.

    Args:
        runs: of ``read_runs``.
        columns: keys of ``summary.json``, at least one; dots go down.
        arms: which, in this order, also those without a finished run; None: all that there are.
    """
    if not columns:
        raise ValueError("columns is empty, but a table needs at least one key of summary.json, such as bits_per_byte")
    runs = [run for run in runs if run.finished and (arms is None or run.arm in arms)]
    names = list(dict.fromkeys(run.arm for run in runs)) if arms is None else list(arms)
    runs.sort(key=lambda run: (names.index(run.arm), run.seed))
    rows = (_row(name, [run for run in runs if run.arm == name], columns) for name in names)
    return Table(tuple(columns), tuple(rows), tuple(runs))


def shown(value: float | None, like: float | None = None) -> str:
    """A number with as many digits as make sense for ``like`` (the number itself): 1.6981, 74.382, 2,274,304."""
    if value is None:
        return "-"
    size = abs(value if like is None else like)
    if size and size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.{0 if size >= 1000 else 2 if size >= 100 else 3 if size >= 10 else 4}f}"


def grid_text(grid: list[list[str]], width: int = WIDTH) -> str:
    """Rows of cells, the names of the columns first, as plain text; what is wider goes on below."""
    return "\n\n".join("\n".join(_aligned(part)) for part in _parts(grid, width))


def grid_markdown(grid: list[list[str]]) -> str:
    """The same in Markdown."""
    return "\n".join(_piped(grid))


def _row(arm: str, runs: list[RunSummary], columns: Sequence[str]) -> Row:
    cells = {column: _cell([v for run in runs if (v := run.value(column)) is not None]) for column in columns}
    return Row(arm, len(runs), cells, {run.seed: run.value(columns[0]) for run in runs})


def _cell(values: list[float]) -> Cell:
    if not values:
        return Cell()
    return Cell(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _difference(pairs: Iterable[tuple[float | None, float | None]]) -> Difference:
    both = [(value, first) for value, first in pairs if value is not None and first is not None]
    if not both:
        return Difference()
    apart = [value - first for value, first in both]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else None
    return Difference(len(apart), statistics.fmean(apart), error, max(abs(first) for _, first in both))


def _widths(grid: list[list[str]]) -> list[int]:
    return [max(len(row[column]) for row in grid) for column in range(len(grid[0]))]


def _parts(grid: list[list[str]], width: int) -> list[list[list[str]]]:
    """The grid in as many parts as the width asks for; each begins with the first column."""
    widths = _widths(grid)
    parts: list[list[int]] = [[0]]
    used = widths[0]
    for column in range(1, len(widths)):
        if used + 2 + widths[column] > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(column)
        used += 2 + widths[column]
    return [[[row[column] for column in part] for row in grid] for part in parts]


def _aligned(grid: list[list[str]]) -> list[str]:
    """Names to the left, numbers to the right."""
    widths = _widths(grid)
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in grid
    ]


def _piped(grid: list[list[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(grid[0]) - 1)]
    return ["| " + " | ".join(row) + " |" for row in [grid[0], rule, *grid[1:]]]
