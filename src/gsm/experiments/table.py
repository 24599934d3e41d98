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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gsm.files import read_json

COLUMNS = ("bits_per_byte", "val_loss")
WIDTH = 100
FOOTNOTE = (
    "mean +- sample standard deviation over the seeds; of differences, mean +- standard error over the seeds that both "
    "arms have, where they are three or more"
)
Grid = list[list[str]]  # rows of cells, the names of the columns first


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
        found = self.number(column)
        return found if found is not None and math.isfinite(found) else None

    def number(self, column: str) -> float | None:
        """The same, finite or not."""
        found: Any = self.summary
        for part in column.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


@dataclass(frozen=True)
class Cell:
    """One column of one arm: the mean over the ``count`` seeds that have a value, and their sample standard deviation.

    Of a difference, ``spread`` is the standard error of the mean, and ``scale`` the size of the values, which
    decides how many digits are shown.
    """

    count: int = 0
    mean: float | None = None
    spread: float | None = None
    scale: float | None = field(default=None, repr=False)

    def __str__(self) -> str:
        if self.mean is None:
            return "-"
        like = self.mean if self.scale is None else self.scale
        sign = "" if self.scale is None else "-" if self.mean < 0 else "+"
        number = f"{sign}{shown(abs(self.mean) if sign else self.mean, like)}"
        return number if self.spread is None else f"{number} +- {shown(self.spread, like)}"


@dataclass(frozen=True)
class Row:
    """One arm: its number of runs, and a cell for each column."""

    arm: str
    runs: int
    cells: dict[str, Cell]


@dataclass(frozen=True)
class Table:
    """Arms and columns, and the runs that they were made from.

    Attributes:
        tuned: by arm, what its runs were tuned to, by key, as it is shown.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    runs: tuple[RunSummary, ...] = field(repr=False)
    tuned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def text(self, width: int = WIDTH) -> str:
        """Plain ASCII; what is wider than ``width`` characters goes on below, under its arms again."""
        return "\n\n".join(grid_text(grid, width) for grid in self.grids())

    def markdown(self) -> str:
        """The same as tables in Markdown."""
        return "\n\n".join(map(grid_markdown, self.grids())) + "\n"

    def grids(self) -> list[Grid]:
        """Means over seeds; where there are several seeds, also the first column seed by seed, and the differences,
        where two arms share two seeds or more."""
        grids = [[["arm", "runs", *self._keys, *self.columns]]]
        grids[0] += [
            [row.arm, str(row.runs), *self._values(row.arm), *map(str, row.cells.values())] for row in self.rows
        ]
        seeds = sorted({run.seed for run in self.runs})
        if len(seeds) > 1:
            first = {(run.arm, run.seed): run.value(self.columns[0]) for run in self.runs}
            grids.append([[self.columns[0], *(f"seed {seed}" for seed in seeds)]])
            grids[1] += [[row.arm, *(shown(first.get((row.arm, seed))) for seed in seeds)] for row in self.rows]
        counts = {arm: max(cell.count for cell in cells.values()) for arm, cells in self.differences().items()}
        if max(counts.values(), default=0) > 1:
            grids.append([[f"minus {self.rows[0].arm}", "seeds", *self.columns]])
            grids[2] += [
                [arm, str(counts[arm]), *map(str, cells.values())] for arm, cells in self.differences().items()
            ]
        return grids

    def csv(self) -> str:
        """One line for each run, with numbers in full."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["arm", "seed", *self._keys, *self.columns])
        writer.writerows(
            [
                run.arm,
                run.seed,
                *(one.partition(" ")[0] for one in self._values(run.arm)),
                *map(run.value, self.columns),
            ]
            for run in self.runs
        )
        return text.getvalue()

    def plain(self) -> dict[str, Any]:
        """The same as containers, for JSON: ``arms``, by name, with ``columns`` and ``seeds``, and ``differences``."""
        arms: dict[str, Any] = {}
        for row in self.rows:
            cells = {name: _named(cell, "spread") for name, cell in row.cells.items()}
            seeds = {str(run.seed): {c: run.value(c) for c in self.columns} for run in self.runs if run.arm == row.arm}
            tuned = {"tuned": dict(self.tuned[row.arm])} if row.arm in self.tuned else {}
            arms[row.arm] = {"runs": row.runs, **tuned, "columns": cells, "seeds": seeds}
        differences = {
            arm: {name: _named(cell, "standard_error") for name, cell in columns.items()}
            for arm, columns in self.differences().items()
        }
        return {
            "columns": list(self.columns),
            "spread": "sample standard deviation over seeds",
            "arms": arms,
            "differences": {"to": self.rows[0].arm if self.rows else None, "arms": differences},
        }

    def differences(self) -> dict[str, dict[str, Cell]]:
        """Every other arm minus the first, column by column, over the seeds that both have.

        Runs of one seed see the same data in the same order: what a seed does to both is gone from their difference.
        """
        found = {(run.arm, run.seed): run for run in self.runs}
        seeds = sorted({run.seed for run in self.runs})
        return {
            row.arm: {
                column: _difference(
                    (found[row.arm, seed].value(column), found[self.rows[0].arm, seed].value(column))
                    for seed in seeds
                    if {(row.arm, seed), (self.rows[0].arm, seed)} <= found.keys()
                )
                for column in self.columns
            }
            for row in self.rows[1:]
        }

    @property
    def _keys(self) -> list[str]:
        """What arms were tuned over."""
        return list(dict.fromkeys(key for values in self.tuned.values() for key in values))

    def _values(self, arm: str) -> list[str]:
        """What an arm was tuned to, under `_keys`."""
        return [self.tuned.get(arm, {}).get(key, "-") for key in self._keys]

    def empty_columns(self) -> list[str]:
        """Columns that no run has a value for, though there are runs."""
        return [c for c in self.columns if self.runs and all(row.cells[c].count == 0 for row in self.rows)]


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
    rows = []
    for name in names:
        own = [run for run in runs if run.arm == name]
        rows.append(Row(name, len(own), {column: _cell(run.value(column) for run in own) for column in columns}))
    return Table(tuple(columns), tuple(rows), tuple(runs))


def shown(value: float | None, like: float | None = None) -> str:
    """A number with as many digits as make sense for ``like`` (the number itself): 1.6981, 74.382, 2,274,304."""
    if value is None:
        return "-"
    size = abs(value if like is None else like)
    if size and size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.{0 if size >= 1000 else 2 if size >= 100 else 3 if size >= 10 else 4}f}"


def grid_text(grid: Grid, width: int = WIDTH) -> str:
    """Rows of cells as plain text, names to the left, numbers to the right; what is wider goes on below, each part with
    the first column again."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    parts: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[c] + 2 for c in [*parts[-1], column]) - 2 > width:
            parts.append([0])
        parts[-1].append(column)
    return "\n\n".join(
        "\n".join("  ".join([row[0].ljust(widths[0]), *(row[c].rjust(widths[c]) for c in part[1:])]) for row in grid)
        for part in parts
    )


def grid_markdown(grid: Grid) -> str:
    """The same in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [grid[0], ["---", *["--:"] * (len(grid[0]) - 1)], *grid[1:]])


def _cell(found: Iterable[float | None]) -> Cell:
    values = [value for value in found if value is not None]
    if not values:
        return Cell()
    return Cell(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _difference(pairs: Iterable[tuple[float | None, float | None]]) -> Cell:
    both = [(value, first) for value, first in pairs if value is not None and first is not None]
    found = _cell(value - first for value, first in both)
    # An error from two seeds says little: it is off by a factor of two or more every other time.
    error = None if found.spread is None or found.count < 3 else found.spread / math.sqrt(found.count)
    return Cell(found.count, found.mean, error, max((abs(first) for _, first in both), default=None))


def _named(cell: Cell, spread: str) -> dict[str, Any]:
    return {"count": cell.count, "mean": cell.mean, spread: cell.spread}
