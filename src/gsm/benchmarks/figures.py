"""The paper's three panels of inference efficiency, from a file of results: prefill, decode, cache, over the length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gsm.benchmarks.comparisons import Row
from gsm.benchmarks.turns import short
from gsm.eval import plots
from gsm_kernels.benchmark.results import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[Row], float]
PANELS: dict[str, Value] = {
    "prefill": lambda row: row["prefill"]["tokens_per_second"],
    "decode": lambda row: row["decode"]["tokens_per_second"],
    "cache": lambda row: row["cache"]["bytes"] / 2**20,
}
LABELS = {"prefill": "prefill (tokens/s)", "decode": "decode (tokens/s)", "cache": "cache (MiB)"}
SYNTHETIC = "open marks: after a synthetic memory"


def picture(path: Path) -> bytes:
    """A PNG of the three panels; filled marks were measured on a prompt that was read.

    Raises ValueError if the file is none of inference results, ImportError if matplotlib is missing.
    """
    content = read(path)
    rows = [row for row in content["rows"].values() if not row.get("failed") and row.get("kind") in ("read", "decode")]
    if not rows:
        raise ValueError(f"{path} holds no request that was measured")
    figure, panels = plots.figure(columns=3, width=3.0, height=3.1)
    styles = plots.styles(row["model"] for row in rows)
    for axes, (what, value) in zip(panels, PANELS.items(), strict=True):
        measured = [row for row in rows if what in row]
        for model, style in styles.items():
            _curve(axes, [row for row in measured if row["model"] == model], value, style)
        if measured:
            _scales(axes, {row["tokens"] for row in rows})
        axes.set_xlabel("input (tokens)", fontsize=9)
        axes.set_ylabel(LABELS[what], fontsize=9)
    figure.legend(*_legend(panels[1], styles), loc="outside lower center", ncols=len(styles), frameon=False, fontsize=9)
    protocol, note = rows[0]["protocol"], f"; {SYNTHETIC}" if any(row.get("synthetic") for row in rows) else ""
    figure.suptitle(
        f"{protocol['size']}, {protocol['dtype']}, batch {protocol['batch']}, {content['device']}{note}", fontsize=9
    )
    return plots.png(figure)


def _curve(axes: Axes, rows: Iterable[Row], value: Value, style: plots.Style) -> None:
    """One model: a line through all its lengths; where a prompt was read, that counts, and its mark is filled."""
    by_length = {row["tokens"]: row for row in sorted(rows, key=lambda row: not row.get("synthetic"))}
    points = sorted(by_length.items())
    axes.plot([n for n, _ in points], [value(row) for _, row in points], style.line, color=style.colour, linewidth=1.4)
    for tokens, row in points:
        face = "white" if row.get("synthetic") else style.colour
        axes.plot(tokens, value(row), style.marker, color=style.colour, markerfacecolor=face, markersize=4.5)


def _scales(axes: Axes, lengths: set[int]) -> None:
    """Logarithms on both axes; a few of the lengths as ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set(xscale="log", yscale="log")
    ticks = sorted(lengths)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 6)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short(round(tokens))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes, styles: dict[str, plots.Style]) -> tuple[list, list[str]]:
    """A line with its mark for each model."""
    marks = [
        axes.plot([], [], style.line, marker=style.marker, color=style.colour, markersize=4.5)[0]
        for style in styles.values()
    ]
    return marks, list(styles)
