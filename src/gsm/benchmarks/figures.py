"""The paper's three panels of inference efficiency, from rows of results: prefill, decode, cache, over the length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gsm.benchmarks.comparisons import Row, Rows
from gsm.benchmarks.turns import short
from gsm.evaluation import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[Row], float]


def processor_ms(row: Row, what: str) -> float | None:
    """Processor time of a prefill or a token, where that is what counts: of one thread of a CPU that others use too."""
    own = row[what].get("processor_ms") if what in row and row.get("threads") == 1 else None
    return own["median"] if own else None


def rate(row: Row, what: str) -> float:
    """Tokens a second of a prefill or of decoding."""
    own = processor_ms(row, what)
    return row[what]["tokens_per_second"] * (row[what]["ms"]["median"] / own if own else 1)


PANELS: dict[str, Value] = {
    "prefill": lambda row: rate(row, "prefill"),
    "decode": lambda row: rate(row, "decode"),
    "cache": lambda row: row["cache"]["bytes"] / 2**20,
}
LABELS = {"prefill": "prefill (tokens/s)", "decode": "decode (tokens/s)", "cache": "cache (MiB)"}
SYNTHETIC = "open marks: after a synthetic memory"
PROCESSOR = "seconds of processor time, one thread"


def about(rows: Rows) -> str:
    """What rows that are alike have in common, as a title."""
    protocol = rows[0]["protocol"]
    return f"{protocol['size']}, {protocol['dtype']}, batch {protocol['batch']}, {rows[0]['device']}"


def picture(rows: Rows) -> bytes:
    """A PNG of the three panels, of rows that are alike; filled marks were measured on a prompt that was read.

    Raises ValueError if there is no request that was measured, ImportError if matplotlib is missing.
    """
    title = about(rows)
    rows = [row for row in rows if not row.get("failed") and row["kind"] in ("read", "decode")]
    if not rows:
        raise ValueError(f"{title}: there is no request that was measured, and so no picture")
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
    notes = {
        PROCESSOR: any(processor_ms(row, "decode") for row in rows),
        SYNTHETIC: any(row["synthetic"] for row in rows),
    }
    figure.suptitle("; ".join([title, *(note for note in notes if notes[note])]), fontsize=9)
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
