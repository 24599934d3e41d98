"""Three panels over the length, prefill, decode and cache, with a line for every model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gsm import plots
from gsm.tables import length_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def panels(title: str, points: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> bytes:
    """Return a PNG, both axes logarithmic.

    Args:
        title: text above all panels.
        points: by label of the vertical axis of a panel and by model, tokens and values, at least one pair.

    Raises ImportError if matplotlib is missing.
    """
    figure, axes = plots.figure(columns=len(points), width=2.9, height=3.0)
    styles = plots.styles(model for by_model in points.values() for model in by_model)
    for axis, (label, by_model) in zip(axes, points.items(), strict=True):
        for model, pairs in by_model.items():
            style = styles[model]
            look = {"color": style.colour, "linewidth": 1.4, "markersize": 4.5}
            axis.plot(*zip(*pairs, strict=True), style.marker + style.line, **look)
        axis.set_xlabel("tokens", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        _scale(axis, sorted({tokens for pairs in by_model.values() for tokens, _ in pairs}))
    from matplotlib.lines import Line2D

    handles = []
    for model, style in styles.items():
        look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "markersize": 4.5}
        handles.append(Line2D([], [], marker=style.marker, label=model, **look))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return plots.png(figure)


def _scale(axes: Axes, ticks: list[int]) -> None:
    """Logarithms on both axes; a few of the lengths as ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 5)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: length_text(round(tokens))))
    plots.plain_numbers(axes.yaxis)
