"""Three panels over the length, prefill, decode and cache, with a line for every model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gsm import plots
from gsm.tables import length_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes", str, str, plots.Style], None]


def panels(
    title: str,
    labels: Mapping[str, str],
    models: Iterable[str],
    lengths: Iterable[int],
    draw: Draw,
) -> bytes:
    """Return a PNG, both axes logarithmic.

    Args:
        title: text above all panels.
        labels: label of the vertical axis of each panel, by the quantity that the panel shows.
        models: models that have a line each.
        lengths: in tokens; some of them are ticks.
        draw: draws a model in a panel. Takes the axes, the quantity, the model and the style.

    Raises ImportError if matplotlib is missing.
    """
    figure, axes = plots.figure(columns=len(labels), width=2.9, height=3.0)
    styles = plots.styles(models)
    for axis, (what, label) in zip(axes, labels.items(), strict=True):
        for model, style in styles.items():
            draw(axis, what, model, style)
        axis.set_xlabel("tokens", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        if axis.has_data():
            _scale(axis, sorted(set(lengths)))
        else:
            axis.set_title("not measured", fontsize=8)
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
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 5)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: length_text(round(tokens))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
