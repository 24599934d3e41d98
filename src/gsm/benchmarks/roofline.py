"""The picture of a file of results: operations under the device's roof (Williams et al. 2009), and shares of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsm.evaluation import plots
from gsm_kernels.benchmark.goals import goals_of
from gsm_kernels.benchmark.results import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def picture(path: Path) -> bytes:
    """A PNG of two panels: FLOP/s over FLOPs per byte, and every row's share of its floor with the goal for it.

    Raises ValueError if the file is none of results, ImportError if matplotlib is missing.
    """
    rows = [row for row in read(path)["rows"].values() if row.get("ms")]
    if not rows:
        raise ValueError(f"{path} holds no row that was measured")
    figure, (under, shares) = plots.figure(columns=2, width=5.2, height=max(2.8, 0.22 * len(rows) + 1))
    _roof(under, [row for row in rows if row["flops"]], rows[-1]["ceilings"])
    _shares(shares, rows)
    return plots.png(figure)


def _roof(axes: Axes, rows: Sequence[Mapping[str, Any]], ceilings: Mapping[str, float]) -> None:
    styles = plots.styles(row["case"].partition(" ")[0] for row in rows)
    ridge = ceilings["flops"] / ceilings["bytes"]
    reach = [row["flops"] / row["bytes"] for row in rows] + [ridge]
    low, high = min(reach) / 2, max(reach) * 2
    axes.plot([low, ridge, high], [low * ceilings["bytes"] / 1e12, *[ceilings["flops"] / 1e12] * 2], "-k", linewidth=1)
    for row, intensity in zip(rows, reach, strict=False):
        style = styles[row["case"].partition(" ")[0]]
        face = "none" if row["direction"] == "backward" else style.colour
        rate = row["flops"] / row["ms"]["median"] / 1e9
        axes.plot(intensity, rate, style.marker, color=style.colour, markerfacecolor=face)
    for name, style in styles.items():
        axes.plot([], [], style.marker, color=style.colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s (open: backward)")
    axes.legend(fontsize=7, frameon=False)


def _shares(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [f"{row['case']}, {row['direction']}" for row in rows]
    axes.barh(names, [100 * row["share_of_floor"] for row in rows], color=plots.COLOURS[0], height=0.6)
    for place, row in enumerate(rows):
        for goal in goals_of(row):
            if goal.peer == "floor":
                axes.plot([100 * goal.least] * 2, [place - 0.4, place + 0.4], color=plots.COLOURS[1], linewidth=2)
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of the floor (%), and the goal")
    axes.tick_params(axis="y", labelsize=7)
