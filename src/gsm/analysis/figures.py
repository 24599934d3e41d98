"""Draw the results of ``gsm.analysis`` on given axes (``gsm.plots.figure``).

``words`` are always the tokens as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsm import plots
from gsm.analysis.attention import by_distance, names_of, sinks, written
from gsm.analysis.attribution import Agreement
from gsm.analysis.interventions import Answers
from gsm.analysis.lens import Lens
from gsm.analysis.needles import NeedleMap, NeedleTest
from gsm.analysis.probes import Probe
from gsm.analysis.rollout import Routes
from gsm.models.gsm import GSM
from gsm.observe import Recording
from gsm.plots import SMALL, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

COLUMNS = 512  # largest number of columns of a map; more could not be distinguished
LETTERED = 40  # largest number of columns with tokens written in the cells; with more, they would overlap
BROUGHT_BACK = "of the answer, brought back"
WEIGHT = "weight, mean of heads"
BARS = (6, 1, 0, 4, 2, 3, 5)  # colours of bars; the first, black, is the unchanged model


def route(axes: Axes, routes: Routes, row: int, needle: Sequence[int] = (), words: Sequence[str] = ()) -> None:
    """Draw the sources of one row's state entry: a bar for each source position, a colour for each way. The positions
    ``needle`` get a mark above the bars."""
    below_T = torch.zeros_like(routes.share_STT[0, row])
    for name, style, share_TT in zip(routes.names, plots.styles(routes.names).values(), routes.share_STT, strict=True):
        share_T = share_TT[row]
        label = f"{name} ({float(share_T.sum()):.0%})"
        axes.bar(
            range(row + 1), share_T[: row + 1], bottom=below_T[: row + 1], width=1.0, color=style.colour, label=label
        )
        below_T = below_T + share_T
    if needle:
        mark = {"transform": axes.get_xaxis_transform(), "clip_on": False, "color": "#000000", "markersize": 6}
        axes.plot(list(needle), [1.02] * len(needle), "v", label="the needle", zorder=3, **mark)
    axes.set_xlim(-2, row + 2)
    if words:
        plots.tokens(axes.xaxis, words[: row + 1])
    entry = f"{words[row]} at {row}" if words else str(row)
    finish(axes, "" if words else "source position (tokens)", f"share of the entry of {entry}")


def route_map(
    axes: Axes,
    routes: Routes,
    way: str,
    rows: Sequence[int],
    needle_places: Sequence[int] = (),
    words: Sequence[str] = (),
) -> None:
    """Draw the sources of some rows' state entries by one way: a line for each row, a column for each source position.
    All ways have the same scale (``colour_bar``). A mark shows the needle of each row's question."""
    highest = float(routes.share_STT[:, list(rows)].max())
    share_RT = routes.share_STT[routes.names.index(way), list(rows)]
    axes.imshow(share_RT.cpu(), vmin=0, vmax=highest, aspect="auto", interpolation="nearest", cmap="Greys")
    if needle_places:
        places = [row - 0.5 for row in range(len(rows))]
        axes.plot(list(needle_places), places, "v", color=plots.COLOURS[1], markersize=4, clip_on=False)
    axes.set_yticks(range(len(rows)), [f"{words[row]} {row}" if words else str(row) for row in rows])
    axes.tick_params(axis="y", labelsize=SMALL - 1)
    if words:
        plots.tokens(axes.xaxis, words)
    title = f"by {way}: {float(share_RT.sum()) / len(rows):.0%}" + ("   (▼: the needle)" if needle_places else "")
    finish(axes, "" if words else "source position (tokens)", "entry of", title)


def correlation(axes: Axes, agreement: Agreement, way: str = "rollout") -> None:
    """Draw one attribution against the movement of z if the token is replaced: a dot for each pair of row and source,
    on logarithmic scales; zeros are left out."""
    style = plots.styles(agreement.attributed)[way]
    attributed_N, moved_N = agreement.attributed[way].flatten(), agreement.attributed["replaced"].flatten()
    positive_N = (attributed_N > 0) & (moved_N > 0)
    axes.loglog(attributed_N[positive_N], moved_N[positive_N], ".", color=style.colour, markersize=4, alpha=0.6)
    title = f"rank correlation {float(agreement.correlation_R[way].nanmean()):.2f}"
    finish(axes, way.replace("_", " x "), "movement of z (its units)", title)


def attention(axes: Axes, map_RT: Tensor, title: str, words: Sequence[str] = (), highest: float | None = None) -> None:
    """Draw a map of attention: a line for each row, a column for each position that is read.

    Colours follow the square root of the weight, so that small weights are visible.

    Args:
        axes: the axes.
        map_RT: result of ``attention.attention_map``.
        title: title of the axes.
        words: all T tokens as text; the rows are the last R of them.
        highest: weight at the end of the colour scale; None: the map's ``bright_end``. Maps with one ``colour_bar``
            need the same.
    """
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=bright_end([map_RT]) if highest is None else highest)
    axes.imshow(map_RT.cpu(), norm=norm, interpolation="nearest")
    if words:
        plots.tokens(axes.xaxis, words)
        plots.tokens(axes.yaxis, words[-len(map_RT) :])
    finish(axes, "token that is read", "token that reads", title)


def bright_end(maps: Sequence[Tensor]) -> float:
    """Return the weight for the end of the colour scale of some maps: the 99th percentile of the weights above 0."""
    weight_N = torch.cat([map_RT[map_RT > 0].flatten() for map_RT in maps])
    return float(weight_N.kthvalue(-(-99 * len(weight_N) // 100)).values) if len(weight_N) else 1.0


def colour_bar(figure: Figure, panels: Sequence[Axes], label: str, **options: Any) -> None:
    """Draw one colour bar for several panels, which must have the same scale."""
    bar = figure.colorbar(panels[0].images[0], ax=list(panels), aspect=30, pad=0.02, **options)
    bar.ax.tick_params(labelsize=SMALL - 1)
    bar.set_label(label, fontsize=SMALL)


def selection(axes: Axes, map_RT: Tensor, title: str = "") -> None:
    """Draw the weights of rows on their selected entries (``attention.selected_weights``): a line for each row, a
    column for each token (in a long sequence, for the highest of several tokens). Tokens that are not selected are
    grey; the dashed line is the row itself."""
    from matplotlib.colors import LogNorm

    rows, length = map_RT.shape
    width = -(-length // COLUMNS)
    whole_RT = torch.nn.functional.pad(map_RT.nan_to_num(0.0), (0, -length % width))
    ends = (-0.5, whole_RT.shape[1] - 0.5, length - 0.5, length - rows - 0.5)
    _weights(axes, whole_RT.unflatten(1, (-1, width)).amax(dim=2), ends, LogNorm(1e-3, 1))
    axes.set_xlim(-0.5, length - 0.5)
    axes.plot([length - rows, length - 1], [length - rows, length - 1], "--", color="#D55E00", linewidth=0.8)
    finish(axes, "token that is read", "token that reads", title)


def state_read(
    axes: Axes,
    weight_YE: Tensor,
    back_W: Tensor,
    rows: Sequence[int],
    y: str,
    highest: float,
    title: str = "",
) -> None:
    """Draw attention to the state: a line for each of ``rows`` (layers, or tokens), a column for each entry that a
    decoder layer sees, by its distance in tokens, and a column for the sink.

    Args:
        axes: the axes.
        weight_YE: weights; each line sums to 1.
        back_W: distances of ``attention.entries_back``; W is E - 1.
        rows: numbers of the lines, ascending by 1.
        y: label of the lines.
        highest: weight at the end of the colour scale, which is linear from 0; panels with one ``colour_bar`` need the
            same, such as their ``bright_end``.
        title: title of the axes.
    """
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    entries = len(back_W)
    wide = max(1, entries // 12)  # width of the sink's column, so that it is visible beside many entries
    ends = (-0.5, entries + wide - 0.5, rows[-1] + 0.5, rows[0] - 0.5)
    wide_YE = torch.cat([weight_YE[:, :-1], weight_YE[:, -1:].expand(-1, wide)], dim=1)
    _weights(axes, wide_YE, ends, Normalize(0, highest))
    axes.axvline(entries - 0.5, color="white", linewidth=1.5)
    step = max(1, entries // 3)
    ticks = range(entries - 1 - step, 0, -step)  # none at the row's own entry, where it would overlap the sink's
    axes.set_xticks([*ticks, entries + (wide - 1) / 2], [*(str(int(back_W[tick])) for tick in ticks), "sink"])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    finish(axes, "state entry (tokens back)", y, title)


def weight_scale(figure: Figure, panels: Sequence[Axes]) -> None:
    """Draw one colour bar for all panels of ``selection``: logarithmic, from 0.1 % to 100 % in every figure."""
    bar = figure.colorbar(panels[0].images[0], ax=list(panels), extend="min", aspect=30, pad=0.02)
    bar.set_ticks([0.001, 0.01, 0.1, 1], labels=["0.1 %", "1 %", "10 %", "100 %"])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label(WEIGHT, fontsize=SMALL)


def state_heads(
    axes: Axes, weight_LHE: Tensor, back_W: Tensor, layers: Sequence[int], words: Sequence[str] = (), title: str = ""
) -> None:
    """Draw each head's attention to the state: a line for each head, layer by layer, a column for each entry, by its
    distance in tokens, and a column for the sink. Colours follow the square root of the weight, from 0 to 1 in every
    figure.

    Args:
        axes: the axes.
        weight_LHE: result of ``attention.decoder_heads``.
        back_W: distances of ``attention.entries_back``; W is E - 1.
        layers: numbers of the layers.
        words: for a single row, the tokens up to it, to show at which the entries were written; empty: distances.
        title: title of the axes.
    """
    from matplotlib.colors import PowerNorm

    heads, norm = weight_LHE.shape[1], PowerNorm(0.5, vmin=0, vmax=1)
    axes.imshow(weight_LHE.flatten(0, 1).cpu().numpy(), norm=norm, aspect="auto", interpolation="nearest")
    for edge in range(heads, weight_LHE.shape[0] * heads, heads):
        axes.axhline(edge - 0.5, color="white", linewidth=1.5)
    axes.axvline(len(back_W) - 0.5, color="white", linewidth=1.5)
    middles = [number * heads + (heads - 1) / 2 for number in range(len(layers))]
    axes.set_yticks(middles, [f"layer {layer}" for layer in layers])
    labels = written(words, back_W) if words else [str(int(back)) for back in back_W]
    plots.tokens(axes.xaxis, [*labels, "sink"])
    axes.grid(visible=False)
    finish(axes, "entry written at" if words else "state entry (tokens back)", f"{heads} heads a layer", title)
    colour_bar(axes.figure.get_figure(root=True), [axes], "weight")


def lens(axes: Axes, lens: Lens, words: Sequence[str], best: Sequence[Sequence[str]] = (), title: str = "") -> None:
    """Draw the probability of the target by a logit lens: a line for each layer, the last on top, a column for each
    row.

    Args:
        axes: the axes.
        lens: result of ``lens.logit_lens``.
        words: the targets as text.
        best: the likeliest token of every cell, written into it if there are at most ``LETTERED`` rows.
        title: title of the axes.
    """
    probability_LR = lens.log_probability_LR.exp().cpu().numpy()
    axes.imshow(probability_LR, vmin=0, vmax=1, origin="lower", aspect="auto", interpolation="nearest")
    for row, line in enumerate(best if len(words) <= LETTERED else ()):
        for column, word in enumerate(line):
            colour = "black" if probability_LR[row, column] > 0.6 else "white"
            axes.text(column, row, word[:7], ha="center", va="center", color=colour, fontsize=SMALL - 3)
    axes.set_yticks(range(len(lens.places)), lens.places)
    plots.tokens(axes.xaxis, words)
    axes.grid(visible=False)
    finish(axes, "token to predict", "after", title)
    colour_bar(axes.figure.get_figure(root=True), [axes], "probability of the token")


def lens_means(axes: Axes, lenses: Mapping[str, Lens]) -> None:
    """Draw the mean log-probability of the targets by layer: a line for each model or removal. Dotted lines are for
    shuffled targets."""
    same = len({lens.places for lens in lenses.values()}) == 1
    longest = max((lens.places for lens in lenses.values()), key=len)
    places = longest if same else [longest[0], *map(str, range(1, len(longest)))]  # names of layers differ by model
    for (name, lens), style in zip(lenses.items(), plots.styles(lenses).values(), strict=True):
        across, options = range(len(lens.places)), {"color": style.colour, "linewidth": 1.4}
        axes.plot(across, lens.log_probability_LR.mean(dim=1).cpu(), style.line, marker="o", label=name, **options)
        axes.plot(across, lens.shuffled_LR.mean(dim=1).cpu(), ":", **options)
    axes.set_xticks(range(len(places)), places, rotation=40, ha="right")
    finish(
        axes,
        "" if same else "layer",
        "log-probability (nats; dotted: shuffled)",
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=3,
    )


def contributions(axes: Axes, by_part: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Draw what each part adds to a logit (``lens.Attribution.by_part``): a row for each part, in the order of
    computation, with a bar for each model or prompt."""
    names = list(dict.fromkeys(part for parts in by_part.values() for part in parts))
    width = 0.8 / len(by_part)
    for number, (name, style) in enumerate(plots.styles(by_part).items()):
        places = [place + width * (number - (len(by_part) - 1) / 2) for place in range(len(names))]
        values = [by_part[name].get(part, 0) for part in names]
        axes.barh(places, values, height=0.92 * width, color=style.colour, label=name)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="#888888", linewidth=1)
    finish(axes, label, ncols=min(4, len(by_part)), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def signed(
    axes: Axes,
    value_YX: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    x: str = "",
    title: str = "",
    highest: float | None = None,
) -> None:
    """Draw signed numbers as colours: white for 0, red above, blue below.

    Args:
        axes: the axes.
        value_YX: the numbers, such as contributions to a logit by layer and head, or shares restored by a patch.
        rows, columns: names of the rows and columns, such as layers and tokens.
        label: label of the colour bar.
        x: label of the columns.
        title: title of the axes.
        highest: absolute value at both ends of the colour scale, the same for pictures to compare; None: the largest.
    """
    largest = float(value_YX.nan_to_num().abs().max())
    end = highest or largest or 1.0
    axes.imshow(value_YX.cpu().numpy(), vmin=-end, vmax=end, cmap="RdBu_r", aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(rows)), rows)
    plots.tokens(axes.xaxis, columns)
    axes.grid(visible=False)
    finish(axes, x, "", title)
    colour_bar(axes.figure.get_figure(root=True), [axes], label, extend="both" if largest > 1.001 * end else "neither")


def cosines(axes: Axes, cosine_EF: Tensor, words: Sequence[str], others: Sequence[str], title: str = "") -> None:
    """Draw the cosines of two states' entries (``state.cosines``), from -1 to 1. ``words`` and ``others`` are the
    tokens at which the entries were written, each at the middle of its entries."""
    axes.imshow(cosine_EF.cpu().numpy(), vmin=-1, vmax=1, cmap="RdBu_r", aspect="auto", interpolation="nearest")
    for axis, entries, labels in zip((axes.yaxis, axes.xaxis), cosine_EF.shape, (words, others), strict=True):
        each = entries // len(labels)
        plots.tokens(axis, labels, [place * each + (each - 1) / 2 for place in range(len(labels))])
    axes.grid(visible=False)
    finish(axes, "", "", title)
    colour_bar(axes.figure.get_figure(root=True), [axes], "cosine")


def parts(axes: Axes, share_SR: Tensor, rows: Sequence[int], title: str = "") -> None:
    """Draw the shares of the encoder and of each stage in z of each row (``rollout.parts_of_state``), stacked."""
    names = ["encoder", *(f"stage {stage}" for stage in range(1, len(share_SR)))]
    means = share_SR.mean(dim=1).tolist()
    labels = [f"{name}, mean {mean:.0%}" for name, mean in zip(names, means, strict=True)]
    colours = [style.colour for style in plots.styles(names).values()]
    axes.stackplot(list(rows), share_SR.float().cpu().numpy(), labels=labels, colors=colours, alpha=0.85, linewidth=0)
    axes.set_xlim(rows[0], rows[-1])
    axes.set_ylim(0, 1)
    finish(axes, "token", "share of z, by length", title, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)


def shares(axes: Axes, states: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Draw the mean shares in z (``state/share/<way>``): a stacked bar for each model."""
    ways = list(dict.fromkeys(name for facts in states.values() for name in facts if name.startswith("state/share/")))
    rows, ends = range(len(states), 0, -1), [0.0] * len(states)
    for way, style in plots.styles(ways).items():
        values = [facts.get(way, 0.0) for facts in states.values()]
        name = way.removeprefix("state/share/")
        axes.barh(list(rows), values, left=ends, height=0.7, color=style.colour, label=name)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    axes.set_yticks(list(rows), list(states))
    axes.set_ylim(0.4, len(states) + 0.6)
    axes.set_xlim(0, 1)
    finish(axes, label, ncols=len(ways), loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=1, handlelength=1)


def probes(axes: Axes, curves: Mapping[str, Mapping[int, Probe]]) -> None:
    """Draw the accuracy of probes by distance: a line for each kind of features. Distances are evenly spaced. Dotted
    lines are for shuffled labels; the grey line is chance."""
    ticks = sorted({distance for curve in curves.values() for distance in curve})
    for (name, curve), style in zip(curves.items(), plots.styles(curves).values(), strict=True):
        distances, results = list(curve), list(curve.values())
        options: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markersize": 4, "linewidth": 1.4}
        label = f"{name} ({results[0].features:,} numbers)"
        places = [ticks.index(distance) for distance in distances]
        axes.plot(places, [result.accuracy for result in results], label=label, **options)
        axes.plot(places, [result.shuffled for result in results], ":", color=style.colour, linewidth=1)
    chance = [result.chance for curve in curves.values() for result in curve.values()]
    axes.axhline(sum(chance) / len(chance), color="#888888", linewidth=1, label="chance")
    axes.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks])
    axes.set_ylim(-0.02, 1.02)
    axes.tick_params(axis="x", rotation=30 if len(ticks) > 14 else 0)
    finish(axes, "distance to the token asked for (tokens)", "held-out tokens found (fraction)")


def needles(axes: Axes, needle_map: NeedleMap, title: str = "") -> None:
    """Draw the accuracy on needle questions: a row for each length, a column for each depth. A cell without needles is
    empty."""
    axes.imshow(needle_map.accuracy_LD, vmin=0, vmax=1, aspect="auto", cmap="viridis")
    for row, column in needle_map.count_LD.nonzero().tolist():
        value = float(needle_map.accuracy_LD[row, column])
        colour = "white" if value < 0.6 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=SMALL)
    middles = [(low + high) / 2 for low, high in zip(needle_map.edges, needle_map.edges[1:], strict=False)]
    axes.set_xticks(range(len(middles)), [f"{middle:.0%}" for middle in middles])
    axes.set_yticks(range(len(needle_map.lengths)), [f"{length:,}" for length in needle_map.lengths])
    finish(axes, "depth of the needle (of the length)", "length (tokens)", title)


def tests(axes: Axes, by_name: Mapping[str, NeedleTest], chance: float | None = None) -> None:
    """Draw needle tests side by side: the fraction answered by the whole model, without the attributed places, and
    without as many others, with a line at ``chance``."""
    parts = {
        "nothing removed": "whole",
        "attributed places": "without_attributed",
        "other places": "without_others",
    }
    groups = {name: {label: getattr(test, part) for label, part in parts.items()} for name, test in by_name.items()}
    accuracies(axes, groups, chance)


def accuracies(
    axes: Axes, groups: Mapping[str, Mapping[str, Answers]], chance: float | None = None, control: str = "chance"
) -> None:
    """Draw the fraction answered: a group of bars for each name, with a bar for each intervention, and a line at
    ``chance``, labelled ``control``. All groups must have the same interventions."""
    labels = list(next(iter(groups.values())))
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        values = [group[label].accuracy for group in groups.values()]
        places = [place + width * (number - (len(labels) - 1) / 2) for place in range(len(groups))]
        axes.bar(places, values, width=0.92 * width, color=plots.COLOURS[BARS[number % len(BARS)]], label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(place, value + 0.01, f"{value:.2f}", ha="center", va="bottom", fontsize=SMALL)
    if chance is not None:
        axes.axhline(chance, color="#888888", linewidth=1, label=control)
    counts = {len(answers.right_N) for group in groups.values() for answers in group.values()}
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_ylim(0, 1.1)
    title = f"{' or '.join(str(count) for count in sorted(counts))} questions a bar"
    finish(axes, "", "questions answered (fraction)", title)


def shares_by_part(axes: Axes, models: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the share of an answer that patching each part restores (``gsm.analysis.patching``): a row for each part,
    with a bar for each model."""
    parts, width = list(next(iter(models.values()))), 0.8 / len(models)
    for number, (label, shares) in enumerate(models.items()):
        values = [shares[part] for part in parts]
        places = [place + width * (number - (len(models) - 1) / 2) for place in range(len(parts))]
        axes.barh(places, values, height=0.92 * width, color=plots.COLOURS[number], label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(max(value, 0) + 0.01, place, f"{round(value, 2) + 0.0:.2f}", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(parts)), parts)
    axes.invert_yaxis()
    axes.set_xlim(min(0, axes.get_xlim()[0]), max(1.12, axes.get_xlim()[1]))
    axes.axvline(1, color="#888888", linewidth=1)
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    finish(axes, f"{BROUGHT_BACK} (0: nothing, 1: all)", ncols=len(models), **above)


def shares_by_place(axes: Axes, names: Mapping[str, Mapping[int, float]], axis_label: str) -> None:
    """Draw the share of an answer that patching each place restores: a group of bars for each place, with a bar for
    each name."""
    width = 0.8 / len(names)
    for number, (label, shares) in enumerate(names.items()):
        places = [place + width * (number - (len(names) - 1) / 2) for place in shares]
        axes.bar(places, list(shares.values()), width=0.92 * width, color=plots.COLOURS[number], label=label)
    axes.set_xticks(list(next(iter(names.values()))))
    axes.axhline(1, color="#888888", linewidth=1)
    axes.set_ylim(min(0, axes.get_ylim()[0]), max(1.1, axes.get_ylim()[1]))
    finish(axes, axis_label, BROUGHT_BACK, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def reach(axes: Axes, model: GSM, seen: Recording, names: Sequence[str], most: int) -> None:
    """Draw the weights of some attentions by distance, in bins of doubling width up to ``most`` tokens."""
    edges = torch.tensor([0, *(1 << power for power in range((most - 1).bit_length()))])
    labels = ["0", "1", *(f"{low:,}-{2 * low - 1:,}" for low in edges[2:].tolist())]
    for name, style in plots.styles(names).items():
        weight_D = by_distance(model, seen, name, edges)
        axes.plot(range(len(labels)), weight_D, style.marker + style.line, color=style.colour, markersize=4, label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, None)
    finish(axes, "distance (tokens)", "attention (fraction)")


def sink_bars(axes: Axes, model: GSM, seen: Recording) -> None:
    """Draw the weight of the sink of each attention: a bar for the mean over heads, a dot for each head."""
    weights = sinks(model, seen)
    colours = {"encoder": plots.COLOURS[0], "stage": plots.COLOURS[1], "decoder": plots.COLOURS[2]}
    for place, (name, weight_H) in enumerate(weights.items()):
        axes.bar(place, float(weight_H.mean()), color=colours[name.partition("/")[0]], width=0.7, alpha=0.75)
        axes.plot([place] * len(weight_H), weight_H.tolist(), ".", color="#000000", markersize=4)
    axes.set_xticks(range(len(weights)), names_of(model), rotation=40, ha="right")
    axes.set_ylim(0, None)
    finish(axes, "", "weight of the sink (fraction)")


def ranks(axes: Axes, values: Sequence[float], most: int) -> None:
    """Draw the effective rank of the state that each position sees, with a line at the highest possible rank."""
    axes.plot(values, color=plots.COLOURS[0], linewidth=1.4)
    axes.axhline(most, color="#888888", linewidth=1, label="at most")
    axes.set_ylim(0, None)
    finish(axes, "position (tokens)", "effective rank of the state")


def _weights(axes: Axes, weight_YX: Tensor, extent: tuple[float, float, float, float], norm: Normalize) -> None:
    """Draw weights as colours; 0 and NaN are grey."""
    from matplotlib import colormaps

    positive_YX = weight_YX.float().where(weight_YX > 0, torch.nan).cpu().numpy()
    colours = colormaps["viridis"].with_extremes(bad="#e4e4e4", under=colormaps["viridis"](0.0))
    options: dict[str, Any] = {"norm": norm, "cmap": colours, "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(positive_YX, extent=extent, **options)
