"""Three panels over the length, prefill, decode and cache: of costs that are computed, and of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gsm.evaluation import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "prefill": ("prefill (GFLOP a token)", lambda row: row["prefill_flops"] / row["tokens"] / 1e9),
    "decode": ("decode (GB moved for a token)", lambda row: row["decode_bytes"] / 1e9),
    "cache": ("cache (MiB)", lambda row: row["cache_bytes"] / 2**20),
}
MEASURED = {
    "prefill_seconds": ("prefill (s)", 1.0),
    "decode_seconds": ("decode (ms a token)", 1e3),
    "cache_bytes": ("cache (MiB)", 2.0**-20),
}


def projection(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG of computed rows: FLOPs of prefill and bytes of decoding for a token, and the cache, over the length.

    Raises ImportError if matplotlib is missing.
    """
    styles = plots.styles(row["model"] for row in rows)
    figure, panels = plots.figure(columns=3, width=2.7, height=2.9)
    for axes, (name, value) in zip(panels, PANELS.values(), strict=True):
        for model, style in styles.items():
            points = [(row["tokens"], value(row)) for row in rows if row["model"] == model]
            axes.plot(*zip(*points, strict=True), color=style.colour, linestyle=style.line, linewidth=1.6)
        _finish(axes, name, (row["tokens"] for row in rows))
    return _with_legend(figure, styles, "computed from the cost model", points=False)


def against(
    rows: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Mapping[int, Mapping[str, float]]],
    titles: Mapping[str, str],
) -> bytes:
    """A PNG of measured points over computed curves.

    Args:
        rows: with model, size, tokens, and of the keys of ``MEASURED`` those that were measured.
        curves: by "model size" and tokens, those keys that are computed.
        titles: of panels, by the same keys.
    """
    styles = plots.styles(curves)
    figure, panels = plots.figure(columns=3, width=2.7, height=2.9)
    for axes, (key, (name, scale)) in zip(panels, MEASURED.items(), strict=True):
        for model, style in styles.items():
            curve = [(tokens, scale * values[key]) for tokens, values in curves[model].items() if key in values]
            here = [row for row in rows if f"{row['model']} {row['size']}" == model and row.get(key)]
            points = [(row["tokens"], scale * row[key]) for row in here]
            for line, how in ((curve, style.line), (points, style.marker)):
                if line:
                    axes.plot(*zip(*line, strict=True), how, color=style.colour, markersize=4.5, linewidth=1.2)
        axes.set_title(titles.get(key, ""), fontsize=8)
        _finish(axes, name, (row["tokens"] for row in rows))
    title = "points: measured; curves: computed, max(FLOPs / rate, bytes / bandwidth)"
    return _with_legend(figure, styles, title, points=True)


def _finish(axes: Axes, name: str, lengths: Iterable[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xlabel("tokens", fontsize=9)
    axes.set_ylabel(name, fontsize=9)
    if not axes.has_data():
        axes.set_title("not measured", fontsize=8)
        return
    axes.set(xscale="log", yscale="log")
    ticks = sorted(set(lengths))
    shown = ticks[:: -(-len(ticks) // 4)]
    axes.set_xticks(shown, [_short(tokens) for tokens in shown])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _with_legend(figure: Figure, styles: Mapping[str, plots.Style], title: str, *, points: bool) -> bytes:
    from matplotlib.lines import Line2D

    handles = []
    for model, style in styles.items():
        look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "markersize": 4.5}
        handles.append(Line2D([], [], marker=style.marker if points else "", label=model, **look))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return plots.png(figure)


def _short(tokens: int) -> str:
    """1024 as 1K, 1048576 as 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return f"{tokens:,}"
