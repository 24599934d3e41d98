"""Pictures of runs: learning curves, final values of every seed, and one number against another.

Every function draws on given axes, which you can arrange freely:

    figure, (left, right) = plots.figure(columns=2)
    plots.curves(left, {"mhc": [{50: 3.1, 100: 2.8}], "plain": [{50: 3.3, 100: 2.9}]}, "optimizer step", "loss")

matplotlib is imported by the first call of ``figure``. The colours are those of Okabe and Ito (2008), for all kinds of
colour vision. Lines and markers differ too, for print without colour.
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
FEW = 8  # curves with at most this number of points get markers, because a single point has no line
SMALL = 8  # smallest font size, in points
LINE = 28  # characters of an arm's name in one line
LETTER = 0.11  # inches per token label along its axis
RIGHT: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}  # a legend beside the axes
REMEDY = f"pictures need matplotlib: {paths.install('plots')}"
LABELS = {
    "accuracy": "questions answered (fraction)",
    "answered": "questions answered (fraction)",
    "bigram/new": "loss of new bigrams (nats per token)",
    "bigram/seen": "loss of seen bigrams (nats per token)",
    "bits_per_byte": "bits per byte of held-out text",
    "cache_bytes": "everything remembered (bytes)",
    "chance": "overlap by chance (fraction)",
    "decoder_bytes": "the decoder's own memory (bytes)",
    "isolated_all_targets": "perplexity",
    "isolated_all_targets/full": "perplexity of all targets",
    "overlap": "overlap (fraction)",
    "overlap.chance": "shared by independent selections (fraction)",
    "overlap.mean": "shared with the encoder's selection (fraction)",
    "state_bytes": "decoder's state (bytes)",
    "stream": "perplexity of running text",
    "stream/full": "perplexity of running text, all targets",
    "text/bits_per_byte": "bits per byte of held-out text",
    "train/loss": "training loss (nats per token)",
    "train_seconds": "training time (s)",
    "tokens_per_second": "training speed (tokens/s)",
    "val/accuracy": "held-out questions answered (fraction)",
    "val/loss": "held-out loss (nats per token)",
    "val_loss": "held-out loss (nats per token)",
    "val_perplexity": "held-out perplexity",
}
BY_LENGTH = re.compile(r"(?P<run>[^/]+)/(?P<quantity>[a-z_]+)/(?P<length>\d+)(?:/(?P<stage>\d+))?")  # of an evaluation
SHORT = {"isolated_all_targets": "perplexity"}  # of quantities by length, whose own words do not tell
UNITS = {"bytes": "bytes", "seconds": "s", "tokens": "tokens", "gib": "GiB"}


@dataclass(frozen=True)
class Style:
    """The look of an arm, the same in every picture."""

    colour: str
    line: str
    marker: str


def styles(arms: Iterable[str]) -> dict[str, Style]:
    """Return a style for each arm, in order: seven colours, then the same colours with other lines and markers."""
    styles_by_arm: dict[str, Style] = {}
    for number, arm in enumerate(dict.fromkeys(arms)):
        again, place = divmod(number, len(COLOURS))
        line, marker = LINES[(place + again) % len(LINES)], MARKERS[(place + again) % len(MARKERS)]
        styles_by_arm[arm] = Style(COLOURS[place], line, marker)
    return styles_by_arm


def named(arms: Iterable[str]) -> dict[str, str]:
    """Return the name of each arm for pictures: its short name, wrapped after ``LINE`` characters."""
    return {arm: textwrap.fill(name, LINE) for arm, name in short(arms).items()}


def short(arms: Iterable[str]) -> dict[str, str]:
    """Return the short name of each arm: without the choices that all arms share, if the names still differ.

    An arm with no other choice gets the name of its model: ``gsm-size_pico`` and ``gsm-writer_gated-size_pico`` become
    ``gsm`` and ``writer_gated``.
    """
    # A hyphen separates choices only before a part with an underscore: the one in lr_1e-4 belongs to the value.
    parts = {arm: re.split(r"-(?=[^-]*_)", arm) for arm in arms}
    common = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    own_parts = {
        arm: "-".join(part for part in words if part not in common) or words[0] for arm, words in parts.items()
    }
    return own_parts if len(set(own_parts.values())) == len(parts) else {arm: arm for arm in parts}


def label(name: str) -> str:
    """Return a metric or a key of ``summary.json`` in words, with the unit if it is known, for axes and heads.

    ``text.bits_per_byte`` is ``text: bits per byte of held-out text``. ``several/answered/65536``, of the evaluation
    ``several`` at a length in tokens, is short, since a table has many of these: ``answered at 65,536 (several)``.
    """
    if name in LABELS:
        return LABELS[name]
    if by_length := BY_LENGTH.fullmatch(name):
        run, quantity = (SHORT.get(by_length[part], by_length[part]).replace("_", " ") for part in ("run", "quantity"))
        stage = f", stage {by_length['stage']}" if by_length["stage"] else ""
        return f"{quantity} at {int(by_length['length']):,}{stage} ({run})"
    name = name.removeprefix("runs.")
    task, *keys = re.split(r"[./]", name, maxsplit=1)
    if keys and keys[0] in LABELS:
        return f"{task.replace('_', ' ')}: {LABELS[keys[0]]}"
    words = name.replace("/", ", ").replace(".", ", ").replace("_", " ")
    first, _, last = words.rpartition(" ")
    return f"{first} ({UNITS[last]})" if first and last in UNITS else words


def figure(
    columns: int = 1, width: float = PANEL[0], height: float = PANEL[1], grid: bool = True, rows: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure and its panels, row by row.

    It uses neither a display nor pyplot. A notebook shows the figure if it is the last expression of a cell.

    Args:
        columns: panels per row.
        width, height: size of a panel in inches.
        grid: draw grid lines.
        rows: number of rows.

    Raises:
        ImportError: matplotlib is not installed; the message gives the command.
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
    """Return the PNG and its display size for a notebook, with twice the resolution, for sharp text on any screen."""
    width, height = (round(100 * inches) for inches in made.get_size_inches())
    return png(made), {"width": width, "height": height}


def png(made: Figure, dots_per_inch: int = 200) -> bytes:
    """Return the figure as the content of a PNG file."""
    content = io.BytesIO()
    made.savefig(content, format="png", dpi=dots_per_inch)
    return content.getvalue()


def svg(made: Figure, name: str) -> str:
    """Return the figure as SVG for an HTML page, with the page's background and font; black becomes its text colour.

    Args:
        made: the figure.
        name: salt of the ids, different for each picture of a page.
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
    """Return the figure as uint8 [height, width, 3]. This is faster than ``png``, which draws a figure twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made.set_dpi(dots_per_inch)
    canvas = FigureCanvasAgg(made)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def finish(axes: Axes, x: str, y: str = "", title: str = "", **legend: Any) -> None:
    """Set the labels of the axes, the title, and a legend beside the axes if anything has a label.

    Args:
        axes: what was drawn on.
        x, y: labels, with units.
        title: of the panel.
        **legend: options of the legend; without any, `RIGHT`.
    """
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if title:
        axes.set_title(title, fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=SMALL, **(legend or RIGHT))


def curves(axes: Axes, arms: Mapping[str, Sequence[Mapping[Any, float]]], x: str, y: str) -> None:
    """Draw per arm a line, the mean over its seeds, and a band from the lowest to the highest seed.

    Args:
        axes: to draw on.
        arms: by name, for each seed its values by step; only steps that all seeds of an arm share are drawn.
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
    finish(axes, x, y)


def together(seeds: Sequence[Mapping[Any, float]]) -> tuple[list[Any], list[list[float]]]:
    """Return the steps that all seeds share, in order, and at each step the values of the seeds."""
    steps = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
    return steps, [[seed[step] for seed in seeds] for step in steps]


def bands(axes: Axes, arms: Mapping[str, Mapping[int, tuple[float, float, float]]], x: str, y: str) -> None:
    """Draw per arm a line over the tested lengths, and a band.

    Args:
        axes: to draw on.
        arms: by name, at each length in tokens the value and both ends of the band.
        x, y: labels of the axes, with units.
    """
    names = named(arms)
    for (arm, points), style in zip(arms.items(), styles(arms).values(), strict=True):
        across = sorted(points)
        middle, low, high = zip(*(points[value] for value in across), strict=True)
        how: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "marker": style.marker}
        axes.plot(across, middle, label=names[arm], linewidth=1.4, markersize=3.5, **how)
        axes.fill_between(across, low, high, color=style.colour, alpha=0.18, linewidth=0)
    by_length(axes, {length for points in arms.values() for length in points})
    finish(axes, x, y)


def cells(
    panels: Sequence[Axes], tasks: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]], x: str, label: str
) -> None:
    """Draw one panel per task: a table with a row per arm and a coloured cell per amount, the mean over the seeds.

    Args:
        panels: axes to draw on, one for each task, from a figure of one row without grid lines.
        tasks: by task and arm, for each seed its values, from 0 to 1, by amount (an integer on the x axis).
        x: label of the x axes.
        label: label of the colour scale.
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
    """Return the mean of the values that are not None; NaN without any."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else float("nan")


def lengths(
    panels: Sequence[Axes],
    tasks: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]],
    x: str,
    y: str,
    top: float | Mapping[str, float],
) -> None:
    """Draw one panel per task, with the curves of all arms over the tested lengths, and a legend below.

    Args:
        panels: axes to draw on, at least one for each task.
        tasks: by task and arm, for each seed its values by length in tokens.
        x, y: labels of the axes, with units.
        top: upper end of the y axis, which begins at 0, for all tasks or by task. A task without one gets a logarithmic
            y axis.
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
        by_length(axes, {length for seeds in arms.values() for seed in seeds for length in seed})
        axes.set_title(task, fontsize=9)
    legend_below(panels)


def legend_below(panels: Sequence[Axes]) -> None:
    """Replace the legends of panels by one below their figure, which grows if that has several lines.

    Args:
        panels: axes of one figure (``figure``); a name in several of them has one look.
    """
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        if legend := axes.get_legend():
            legend.remove()
    made = panels[0].figure.get_figure(root=True)
    lines = [name.splitlines() for name in handles] or [[""]]
    # Inches of a legend entry: the sample of a line, and the text.
    broad = 0.4 + 0.065 * max(len(line) for name in lines for line in name)
    rows = -(-len(lines) // max(1, int(made.get_figwidth() / broad)))
    columns = -(-len(lines) // rows)
    made.set_figheight(made.get_figheight() + 0.15 * (rows * max(map(len, lines)) - 1))  # room for more lines
    how: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
    made.legend([*handles.values()], [*handles], frameon=False, fontsize=SMALL, **how)


def by_length(axes: Axes, lengths: Iterable[int]) -> None:
    """Give the x axis a logarithmic scale with a tick at each length, at most eight of them.

    Args:
        axes: to draw on.
        lengths: in tokens.
    """
    from matplotlib.ticker import NullFormatter

    ticks = sorted(lengths)
    ticks = ticks[:: -(-len(ticks) // 8)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [length_text(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())


def quantities(points: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]]) -> Figure:
    """Return a figure with one panel per quantity over length: ``answered`` from 0 to 1, others on a logarithmic axis.

    Args:
        points: by quantity and arm, for each seed its values by length in tokens.
    """
    made, panels = figure(columns=len(points), width=3.6, height=2.9)
    lengths(
        panels, {label(name): arms for name, arms in points.items()}, "length (tokens)", "", {label("answered"): 1.0}
    )
    return made


def over_length(lines: Mapping[str, Sequence[Mapping[int, float]]], y: str) -> Figure:
    """Return a figure with one panel, which has a line for each quantity over length, from zero.

    Args:
        lines: by quantity, for each seed its values by length in tokens.
        y: label of the y axis, with the unit that all of them have.
    """
    made, (axes,) = figure(width=5.2, height=2.9)
    curves(axes, lines, "length (tokens)", y)
    by_length(axes, {length for seeds in lines.values() for seed in seeds for length in seed})
    axes.set_ylim(bottom=0)
    return made


def seeds(axes: Axes, arms: Mapping[str, Sequence[float]], x: str) -> None:
    """Draw one row per arm, empty without values: the value of each seed as a dot, and their mean as a bar.

    Args:
        axes: to draw on.
        arms: by name, the values of the seeds.
        x: label of the axis, with its unit.
    """
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
        arms: by name, the difference; without an interval (fewer than three seeds) the dot is hollow.
        x: label of the axis, with its unit.
        margin: half the width of a grey band around 0, for differences that count as none; 0: no band.
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
    """Draw one point per arm at the means of its seeds, with bars of one sample standard deviation.

    Args:
        axes: to draw on; the x axis becomes logarithmic.
        arms: by name, the values of its seeds along x, which are positive, and along y.
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
    finish(axes, x, y)


def plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis with full numbers (20,000) at 1, 2 and 5 of every decade; over three decades, at 1.

    Where at most one of these is in view, ticks are evenly spaced. Call it after drawing.
    """
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    decades = LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,))
    if sum(low <= tick <= high for tick in decades.tick_values(low, high)) > 1:
        axis.set_major_locator(decades)
    else:
        axis.set_major_locator(AutoLocator())
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def tokens(axis: Axis, words: Sequence[str], places: Sequence[float] | None = None) -> None:
    """Label an axis with tokens; if they do not all fit, with every second, third, ...

    Args:
        axis: the x or y axis.
        words: texts of the tokens.
        places: their places on the axis; None: 0, 1, 2, ...
    """
    axes, along_x = axis.axes, axis is axis.axes.xaxis
    spec, made = axes.get_subplotspec(), axes.figure.get_figure(root=True)
    rows, columns = spec.get_gridspec().get_geometry() if spec else (1, 1)
    inches = made.get_figwidth() / columns if along_x else made.get_figheight() / rows
    step = max(1, -(-len(words) // max(1, int(0.75 * inches / LETTER))))
    numbers = list(range(len(words)) if places is None else places)
    axis.set_ticks(numbers[::step], labels=list(words)[::step])
    axis.set_tick_params(labelsize=SMALL - 2, rotation=90 if along_x else 0)


def _spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None if it is 0, or for a single value."""
    return (statistics.stdev(values) or None) if len(values) > 1 else None
