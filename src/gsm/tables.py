"""Tables of texts: printed, and written as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH = 100  # characters of a line of a table
SCREEN = 78  # characters of a line of a report, on a terminal of 80 columns
Grid = list[list[str]]  # rows of cells, the names of the columns first


def grid_text(grid: Grid, width: int = WIDTH) -> str:
    """Return rows of cells as plain text, names to the left, numbers to the right. Columns that do not fit go below,
    each part with the first column again."""
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


def grid_lines(grid: Grid) -> list[str]:
    """Return the same in lines, indented as the parts of a report are."""
    return [f"  {line}" for line in grid_text(grid).splitlines()]


def grid_markdown(grid: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right; the last cells of a row may be left out."""
    head, *rows = grid
    whole = [head, ["---", *["--:"] * (len(head) - 1)], *([*row, *[""] * (len(head) - len(row))] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in whole)


def grid_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV, numbers in full."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def filled(sentences: Iterable[str], width: int = WIDTH) -> str:
    """Return sentences, each on lines of its own, broken at spaces."""
    lines = (textwrap.wrap(one, width, break_on_hyphens=False, break_long_words=False) for one in sentences)
    return "\n".join(line for some in lines for line in some)


def length_text(tokens: int) -> str:
    """Return a number of tokens as 256, 4K, 256K or 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return str(tokens)


def number_text(value: float | None, like: float | None = None) -> str:
    """Return a number with the digits that make sense for ``like``, by default itself: 1.6981, 74.382, 2,274,304."""
    if value is None:
        return "-"
    size = abs(value if like is None else like)
    if size and size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.{0 if size >= 1000 else 2 if size >= 100 else 3 if size >= 10 else 4}f}"
