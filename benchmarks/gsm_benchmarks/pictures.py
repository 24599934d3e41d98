"""Three panels over the length, prefill, decode and cache, with a line for every model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gsm.evaluation import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes", str, str, plots.Style], None]


def short(tokens: int) -> str:
    """256, 4K, 256K, 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return str(tokens)


def panels(
    title: str,
    labels: Mapping[str, str],
    models: Iterable[str],
    lengths: Iterable[int],
    draw: Draw,
    points: bool = True,
) -> bytes:
    """A PNG, both axes logarithmic.

    Args:
        title: above all panels.
        labels: of the vertical axes, one a panel, by what they show.
        models: that have a line each.
        lengths: in tokens; some of them are ticks.
        draw: draws a model in a panel: on which axes, what they show, which model, in which style.
        points: whether the legend shows marks.

    Raises ImportError if matplotlib is missing.
    """
    figure, axes = plots.figure(columns=len(labels), width=2.9, height=3.0)
    styles = plots.styles(models)
    for one, (what, label) in zip(axes, labels.items(), strict=True):
        for model, style in styles.items():
            draw(one, what, model, style)
        one.set_xlabel("tokens", fontsize=9)
        one.set_ylabel(label, fontsize=9)
        if one.has_data():
            _scale(one, sorted(set(lengths)))
        else:
            one.set_title("not measured", fontsize=8)
    from matplotlib.lines import Line2D

    handles = []
    for model, style in styles.items():
        look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "markersize": 4.5}
        handles.append(Line2D([], [], marker=style.marker if points else "", label=model, **look))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return plots.png(figure)


def _scale(axes: Axes, ticks: list[int]) -> None:
    """Logarithms on both axes; a few of the lengths as ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 5)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short(round(tokens))))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
