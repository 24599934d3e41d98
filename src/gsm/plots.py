"""Pictures of runs: learning curves, final values with every seed, and one number against another.

Every function draws on axes that it is given, so that they can be arranged freely, in a file or in a notebook:

    figure, (left, right) = plots.figure(columns=2)
    plots.curves(left, {"mhc": [{50: 3.1, 100: 2.8}], "plain": [{50: 3.3, 100: 2.9}]}, "optimizer step", "loss")

matplotlib is imported when the first figure is made. The colours come from Okabe and Ito (2008): people with any kind
of colour vision can distinguish them. Lines and markers differ too, for print without colour.
"""

from __future__ import annotations

import io
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gsm import paths
from gsm.tables import length_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from gsm.intervals import Cell

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL = (3.6, 2.8)  # inches
FEW = 8  # curves of at most this number of points have markers: a single point has no line
SMALL = 8  # size of the smallest letters, in points
LINE = 28  # letters of an arm's name in one line
LETTER = 0.11  # inches that a token takes across its axis
MANY = 6  # largest number of arms with a legend inside the axes
REMEDY = f"pictures need matplotlib: {paths.install('plots')}"
LABELS = {
    "accuracy": "questions answered (fraction)",
    "answered": "questions answered (fraction)",
    "bits_per_byte": "bits per byte of held-out text",
    "cache_bytes": "everything remembered (bytes)",
    "decoder_bytes": "the decoder's own memory (bytes)",
    "isolated_all_targets": "perplexity",
    "state_bytes": "decoder's state (bytes)",
    "text/bits_per_byte": "bits per byte of held-out text",
    "train/loss": "training loss (nats per token)",
    "tokens_per_second": "training speed (tokens/s)",
    "val/accuracy": "held-out questions answered (fraction)",
    "val/loss": "held-out loss (nats per token)",
    "val_loss": "held-out loss (nats per token)",
    "val_perplexity": "held-out perplexity",
}
UNITS = {"bytes": "bytes", "seconds": "s", "tokens": "tokens", "gib": "GiB"}


@dataclass(frozen=True)
class Style:
    """The look of an arm, the same in every picture."""

    colour: str
    line: str
    marker: str


def styles(arms: Iterable[str]) -> dict[str, Style]:
    """Return a style for each arm, by its place: seven colours, then the same with other lines and markers."""
    styles_by_arm: dict[str, Style] = {}
    for number, arm in enumerate(dict.fromkeys(arms)):
        again, place = divmod(number, len(COLOURS))
        line, marker = LINES[(place + again) % len(LINES)], MARKERS[(place + again) % len(MARKERS)]
        styles_by_arm[arm] = Style(COLOURS[place], line, marker)
    return styles_by_arm


def named(arms: Iterable[str]) -> dict[str, str]:
    """Return the name of each arm in a picture: its short name in lines of ``LINE`` letters. Tables have full names."""
    return {arm: textwrap.fill(name, LINE) for arm, name in short(arms).items()}


def short(arms: Iterable[str]) -> dict[str, str]:
    """Return names without the choices that all arms have, as long as they still differ.

    An arm without another choice is called after its model: ``gsm-size_pico`` and ``gsm-writer_gated-size_pico`` become
    ``gsm`` and ``writer_gated``.
    """
    # A part behind a hyphen without an underscore belongs to the value before it, as in lr_1e-4.
    parts = {arm: re.split(r"-(?=[^-]*_)", arm) for arm in arms}
    common = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    own_parts = {
        arm: "-".join(part for part in words if part not in common) or words[0] for arm, words in parts.items()
    }
    return own_parts if len(set(own_parts.values())) == len(parts) else {arm: arm for arm in parts}


def label(name: str) -> str:
    """Return a key of ``summary.json`` or a metric as the label of an axis, with its unit where the name has it."""
    if name in LABELS:
        return LABELS[name]
    task, _, key = name.partition(".")
    if key in LABELS:
        return f"{task}: {LABELS[key]}"
    words = name.replace("/", ", ").replace(".", ", ").replace("_", " ")
    first, _, last = words.rpartition(" ")
    return f"{first} ({UNITS[last]})" if first and last in UNITS else words


def figure(
    columns: int = 1, width: float = PANEL[0], height: float = PANEL[1], grid: bool = True, rows: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with ``columns`` panels in every row, each of this size in inches, with grid lines or without.

    It needs no display and no pyplot. A notebook shows it if it is the last expression of a cell. Raises ImportError,
    with the way to install matplotlib, where it is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(REMEDY) from error
    made = Figure(figsize=(width * columns, height * rows), layout="constrained")
    made._repr_png_ = partial(_shown, made)  # pyright: ignore[reportAttributeAccessIssue]  # IPython calls it
    panels = list(made.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        if grid:
            axes.grid(alpha=0.25, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=SMALL)
    return made, panels


def _shown(made: Figure) -> tuple[bytes, dict[str, int]]:
    """The figure for a notebook: twice as many dots as its size on the page, for sharp letters on any screen."""
    width, height = (round(100 * inches) for inches in made.get_size_inches())
    return png(made), {"width": width, "height": height}


def png(made: Figure, dots_per_inch: int = 200) -> bytes:
    """The figure as a file's content."""
    content = io.BytesIO()
    made.savefig(content, format="png", dpi=dots_per_inch)
    return content.getvalue()


def svg(made: Figure, name: str) -> str:
    """Return the figure as a part of an HTML page: on its background, in its font, black in the colour of its letters.

    Args:
        made: the figure.
        name: prefix of its ids, different from the prefixes of all other pictures of the page.
    """
    from matplotlib import rc_context

    content = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        made.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    text = content.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<style type.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'width="(\S+)" height="\S+"', r'style="width: \1; min-width: calc(.6 * \1)"', text, count=1)
    text = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"| xmlns:xlink="[^"]*"', "", text).replace("xlink:href=", "href=")
    return re.sub(r'style="[^"]*"', lambda style: style[0].replace("#000000", "currentColor"), text)


def pixels(made: Figure, dots_per_inch: int = 150) -> NDArray[np.uint8]:
    """Return the figure as uint8 [height, width, 3]; drawn once, while ``png`` lays it out first and then draws it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made.set_dpi(dots_per_inch)
    canvas = FigureCanvasAgg(made)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def finish(axes: Axes, x: str, y: str = "", title: str = "", **legend: Any) -> None:
    """Set the labels of the axes, with units, a title, and a legend if anything has a name."""
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if title:
        axes.set_title(title, fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=SMALL, **legend)


def curves(axes: Axes, arms: Mapping[str, Sequence[Mapping[Any, float]]], x: str, y: str) -> None:
    """Draw one line per arm: the mean over its seeds, in a band from the lowest to the highest seed.

    Args:
        axes: to draw on.
        arms: by name, for each seed its values by step; only the common steps of all seeds are drawn.
        x, y: labels of the axes, with units.
    """
    chosen, names = styles(arms), named(arms)
    for arm, seeds in arms.items():
        steps, values = together(seeds)
        if not steps:
            continue
        means, style = [statistics.fmean(column) for column in values], chosen[arm]
        how: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "linewidth": 1.4, "markersize": 4}
        axes.plot(steps, means, label=names[arm], marker=style.marker if len(steps) <= FEW else None, **how)
        if len(seeds) > 1:
            axes.fill_between(
                steps, list(map(min, values)), list(map(max, values)), color=style.colour, alpha=0.18, linewidth=0
            )
    finish(axes, x, y, **_beside(names))


def together(seeds: Sequence[Mapping[Any, float]]) -> tuple[list[Any], list[list[float]]]:
    """Return the common steps of all seeds, in order, and the seeds' values at each."""
    steps = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
    return steps, [[seed[step] for seed in seeds] for step in steps]


def bands(axes: Axes, arms: Mapping[str, Mapping[int, tuple[float, float, float]]], x: str, y: str) -> None:
    """Draw one line per arm over the tested lengths, in a band.

    Args:
        axes: to draw on.
        arms: by name, at each length in tokens the value, the lower and the upper end of the band.
        x, y: labels of the axes, with units.
    """
    names = named(arms)
    for (arm, points), style in zip(arms.items(), styles(arms).values(), strict=True):
        across = sorted(points)
        middle, low, high = zip(*(points[value] for value in across), strict=True)
        how: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "marker": style.marker}
        axes.plot(across, middle, label=names[arm], linewidth=1.4, markersize=3.5, **how)
        axes.fill_between(across, low, high, color=style.colour, alpha=0.18, linewidth=0)
    _by_length(axes, {length for points in arms.values() for length in points})
    finish(axes, x, y, **_beside(names))


def cells(
    panels: Sequence[Axes], tasks: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]], x: str, label: str
) -> None:
    """Draw one panel per task, in it a row per arm with a cell for each amount: the mean over its seeds, from 0 to 1.

    Args:
        panels: axes to draw on, one for each task, from a figure of one row without grid lines.
        tasks: by name, by arm, for each seed its values by amount.
        x: label of the axes.
        label: label of the values.
    """
    for axes, (task, arms) in zip(panels, tasks.items(), strict=True):
        amounts = sorted({amount for seeds in arms.values() for seed in seeds for amount in seed})
        rows = [[_mean(seed.get(amount) for seed in seeds) for amount in amounts] for seeds in arms.values()]
        shown = axes.imshow(rows, vmin=0, vmax=1, aspect="auto", cmap="cividis", interpolation="nearest")
        for (row, column), value in np.ndenumerate(np.array(rows)):
            colour = "black" if value > 0.6 else "white"
            if not np.isnan(value):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
        axes.set_xticks(range(len(amounts)), [f"{amount:,}" for amount in amounts])
        first = axes is panels[0]
        axes.set_yticks(range(len(arms)), list(named(arms).values()) if first else [""] * len(arms))
        finish(axes, x, title=task)
        made = axes.figure.get_figure(root=True)
        if axes is panels[-1] and made:
            made.colorbar(shown, ax=axes).set_label(label, fontsize=9)


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean of the values that are there; nan without any."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else float("nan")


def lengths(
    panels: Sequence[Axes],
    tasks: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]],
    x: str,
    y: str,
    top: float | Mapping[str, float],
) -> None:
    """Draw one panel per task, in it one line per arm over the tested lengths, as in ``curves``; one legend.

    Args:
        panels: axes to draw on, at least one for each task, from a figure of one row or several.
        tasks: by name, by arm, for each seed its values by length.
        x, y: labels of the axes, with units.
        top: the highest possible value; the lowest is 0. By task: one that is not in it has a logarithmic axis.
    """
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    panels = panels[: len(tasks)]
    for axes, (task, arms) in zip(panels, tasks.items(), strict=True):
        place = axes.get_subplotspec()
        curves(axes, arms, x, y if place is None or place.is_first_col() else "")
        highest = top.get(task) if isinstance(top, Mapping) else top
        if highest is None:
            axes.set_yscale("log")
            plain_numbers(axes.yaxis)
        else:
            axes.set_ylim(-0.03 * highest, 1.03 * highest)
        for line in axes.get_lines():
            line.set_marker(styles(named(arms).values())[str(line.get_label())].marker)
            line.set_markersize(4)
        _by_length(axes, {length for seeds in arms.values() for seed in seeds for length in seed})
        axes.set_title(task, fontsize=9)
        legend = axes.get_legend()
        if legend:
            legend.remove()
    handles, names = panels[-1].get_legend_handles_labels()
    made = panels[-1].figure.get_figure(root=True)
    lines = [name.splitlines() for name in names] or [[""]]
    broad = 0.4 + 0.065 * max(len(line) for name in lines for line in name)  # inches: a line's sample, and its letters
    rows = -(-len(lines) // max(1, int(made.get_figwidth() / broad)))
    columns = -(-len(lines) // rows)
    made.set_figheight(made.get_figheight() + 0.15 * (rows * max(map(len, lines)) - 1))  # for more than one line of it
    how: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
    made.legend(handles, names, frameon=False, fontsize=SMALL, **how)


def _by_length(axes: Axes, lengths: Iterable[int]) -> None:
    """Give the x axis a logarithmic scale with a tick at each length, at most eight of them."""
    from matplotlib.ticker import NullFormatter

    ticks = sorted(lengths)
    ticks = ticks[:: -(-len(ticks) // 8)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [length_text(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())


def quantities(points: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]]) -> Figure:
    """Return a figure with a panel for each quantity by length: a share from 0 to 1, others in logarithms.

    Args:
        points: by quantity, by arm, for each seed its values by length in tokens.
    """
    made, panels = figure(columns=len(points), width=3.6, height=2.9)
    lengths(
        panels, {label(name): arms for name, arms in points.items()}, "length (tokens)", "", {label("answered"): 1.0}
    )
    return made


def seeds(axes: Axes, arms: Mapping[str, Sequence[float]], x: str) -> None:
    """Draw one row per arm: each seed's value as a dot, and their mean as a bar; an arm without a value has an empty
    row."""
    chosen = styles(arms)
    rows = range(len(arms), 0, -1)
    for row, (arm, values) in zip(rows, arms.items(), strict=True):
        style = chosen[arm]
        axes.plot(values, [row] * len(values), style.marker, color=style.colour, markersize=5, alpha=0.7)
        if values:
            axes.plot(statistics.fmean(values), row, "|", color=style.colour, markersize=18, markeredgewidth=1.6)
    axes.set_yticks(list(rows), list(named(arms).values()))
    axes.set_ylim(0.4, len(arms) + 0.6)
    axes.locator_params(axis="x", nbins=5)
    finish(axes, x)


def differences(axes: Axes, arms: Mapping[str, Cell], x: str, margin: float = 0.0) -> None:
    """Draw one row per arm: its mean difference from another arm as a dot, and the 95 % interval as a bar.

    Args:
        axes: to draw on.
        arms: by name, a difference; without an interval (fewer than three seeds) it is a hollow dot.
        x: label of the axis, with its unit.
        margin: half the width of the grey band around 0 in which a difference counts as none; 0: no band.
    """
    rows = range(len(arms), 0, -1)
    axes.axvline(0, color="black", linewidth=0.8)
    if margin:
        axes.axvspan(-margin, margin, color="black", alpha=0.08, linewidth=0)
    for row, cell in zip(rows, arms.values(), strict=True):
        if cell.mean is not None:
            how: dict[str, Any] = {"color": COLOURS[0], "markersize": 5, "linewidth": 1.4, "capsize": 3}
            filled = COLOURS[0] if cell.spread is not None else "white"
            axes.errorbar(cell.mean, row, xerr=cell.spread, fmt="o", markerfacecolor=filled, **how)
    axes.set_yticks(list(rows), list(named(arms).values()))
    axes.set_ylim(0.4, len(arms) + 0.6)
    axes.locator_params(axis="x", nbins=5)
    finish(axes, x)


def against(axes: Axes, arms: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str) -> None:
    """Draw one point per arm, at the means of its seeds; bars show a sample standard deviation. The x axis is
    logarithmic.

    Args:
        axes: to draw on.
        arms: by name, its seeds' values along x, all above 0, and along y.
        x, y: labels of the axes, with units.
    """
    names = named(arms)
    for (arm, (across, up)), style in zip(arms.items(), styles(arms).values(), strict=True):
        if across and up:
            bars: dict[str, Any] = {"xerr": _spread(across), "yerr": _spread(up)}
            how: dict[str, Any] = {"color": style.colour, "markersize": 6, "capsize": 2, "linewidth": 1}
            axes.errorbar(
                statistics.fmean(across), statistics.fmean(up), fmt=style.marker, label=names[arm], **bars, **how
            )
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.tick_params(axis="x", rotation=30)
    finish(axes, x, y, **_beside(names))


def plain_numbers(axis: Axis) -> None:
    """Give a logarithmic axis ticks at 1, 2 and 5 of every decade, written out: 20,000; of three decades, at 1.

    Where at most one of these is in view, matplotlib puts ticks at even distances.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def tokens(axis: Axis, words: Sequence[str], places: Sequence[float] | None = None) -> None:
    """Label an axis with tokens; where there are more than fit, with every second, third, ..."""
    axes, along_x = axis.axes, axis is axis.axes.xaxis
    spec, made = axes.get_subplotspec(), axes.figure.get_figure(root=True)
    rows, columns = spec.get_gridspec().get_geometry() if spec else (1, 1)
    inches = made.get_figwidth() / columns if along_x else made.get_figheight() / rows
    step = max(1, -(-len(words) // max(1, int(0.75 * inches / LETTER))))
    numbers = list(range(len(words)) if places is None else places)
    axis.set_ticks(numbers[::step], labels=list(words)[::step])
    axis.set_tick_params(labelsize=SMALL - 2, rotation=90 if along_x else 0)


def _beside(names: Mapping[str, str]) -> dict[str, Any]:
    """Return the place of the legend: to the right, if there are many names, or long ones."""
    wide = len(names) > MANY or any("\n" in name for name in names.values())
    return {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if wide else {}


def _spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation, None where there is none to draw."""
    return (statistics.stdev(values) or None) if len(values) > 1 else None
