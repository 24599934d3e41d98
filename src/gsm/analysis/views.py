"""Figures of one recorded call of a GSM, for TensorBoard and notebooks. They need matplotlib.

    with gsm.record(*views.TAPS) as seen:
        model(tokens)
    views.selection(model, seen)

Weights are means over heads. The selections of all steps and runs have the same logarithmic scale; what the decoder
reads has a linear one, up to the 99th percentile of the entries' weights in the figure; a sink may have more.

B sequences, T positions, R rows, E entries, L layers, S ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from gsm import plots
from gsm.analysis import figures
from gsm.analysis.attention import decoder_attention, decoder_layers, entries_back, selected_weights
from gsm.analysis.rollout import parts_of_state
from gsm.models.gsm import GSM
from gsm.observe import Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TAPS = ("position", "stage/*", "state/e", "decoder/*/weights")
WIDTH, HEIGHT = 4.8, 2.9  # inches; small enough for text to be readable in TensorBoard


def views(model: GSM, seen: Recording) -> Iterator[tuple[str, Figure]]:
    """Yield names and figures: the decoder's attention to the state, its mean over rows and by row; the selections of
    the stages; the parts of z. All but the first are of the first sequence.

    Args:
        model: the recorded model.
        seen: a recording of one call without a memory (``TAPS``).

    Raises:
        ImportError: if matplotlib is not installed.
    """
    yield "decoder_reads", decoder(model, seen)
    yield "decoder_reads_by_row", decoder_rows(model, seen)
    if any(f"stage/{stage}/top_k" in seen for stage in _stages(model)):
        yield "stages_select", selection(model, seen)
    if model.aggregation.layers:
        yield "state_is_made_of", state_parts(model, seen)


def decoder(model: GSM, seen: Recording, width: float = WIDTH, height: float = HEIGHT) -> Figure:
    """Draw each decoder layer's attention to the state, the mean over all rows that see a full state; width and height
    in inches."""
    weight_LE, layers = decoder_attention(model, seen), decoder_layers(model)
    figure, panels = plots.figure(width=width, height=height, grid=False)
    longest = layers[int(weight_LE.isnan().sum(1).argmin())]
    back_W = entries_back(model, f"decoder/{longest}", weight_LE.shape[1] - 1)
    title, highest = "what decoder layers read of the shared state", figures.bright_end([weight_LE[:, :-1]])
    figures.state_read(panels[0], weight_LE, back_W, layers, "decoder layer", highest, title)
    figures.colour_bar(figure, panels, figures.WEIGHT, extend="max")
    return figure


def decoder_rows(model: GSM, seen: Recording) -> Figure:
    """Draw the attention to the state by row of the first sequence, with a panel for each decoder layer."""
    layers = decoder_layers(model)
    figure, panels = _panels(len(layers), columns=min(4, len(layers)), height=HEIGHT)
    maps = [seen[f"decoder/{layer}/weights"][0].float().mean(dim=1) for layer in layers]
    highest = figures.bright_end([weight_RE[:, :-1] for weight_RE in maps])
    for axes, layer, weight_RE in zip(panels, layers, maps, strict=True):
        back_W, rows = entries_back(model, f"decoder/{layer}", weight_RE.shape[1] - 1), _rows(seen, len(weight_RE))
        figures.state_read(axes, weight_RE, back_W, rows, "token that reads", highest, f"layer {layer}")
    figure.supxlabel(panels[0].get_xlabel(), fontsize=9)
    _label_outer(panels, columns=min(4, len(layers)))
    for axes in panels:
        axes.set_xlabel("")
    figures.colour_bar(figure, panels, figures.WEIGHT, extend="max")
    return figure


def selection(model: GSM, seen: Recording) -> Figure:
    """Draw the attention weights of each stage on its selected entries, in the first sequence, with a panel for each
    stage."""
    rows = seen[f"decoder/{model.geometry.depth}/weights"].shape[1]
    maps, stages = selected_weights(model, seen, rows), list(model.aggregation)
    figure, panels = _panels(len(maps), columns=1, height=HEIGHT if len(maps) == 1 else 0.55 * HEIGHT)
    for axes, (stage, map_RT) in zip(panels, maps.items(), strict=True):
        layer, follows = model.aggregation.layers[stage - 1], stages[stage - 1].retriever.follows_encoder
        how = f"reads what layer {layer} selects" if follows else f"on layer {layer} selects for itself"
        figures.selection(axes, map_RT, f"stage {stage} {how}")
    figures.weight_scale(figure, panels)
    _label_outer(panels, columns=1)
    return figure


def state_parts(model: GSM, seen: Recording) -> Figure:
    """Draw the shares of the encoder and of each stage in z, by row of the first sequence
    (``rollout.parts_of_state``)."""
    share_SR = parts_of_state(model, seen)
    figure, (axes,) = plots.figure(width=WIDTH, height=HEIGHT, grid=False)
    figures.parts(axes, share_SR, _rows(seen, share_SR.shape[1]), "what is written to the shared state")
    return figure


def shares(model: GSM, seen: Recording) -> dict[str, float]:
    """Return ``state/share/encoder`` and ``state/share/stage<s>``, the share of each in z, the mean over all rows
    except padding; empty without stages."""
    if not model.aggregation.layers:
        return {}
    sequences, rows = seen["state/e"].shape[:2]
    share_SN = torch.cat([parts_of_state(model, seen, sequence) for sequence in range(sequences)], dim=1)
    counted_N = (seen["position"][:, -rows:] >= 0).flatten()
    names = ["encoder", *(f"stage{stage}" for stage in _stages(model))]
    means = share_SN[:, counted_N].mean(dim=1).tolist()
    return {f"state/share/{name}": mean for name, mean in zip(names, means, strict=True)}


def _stages(model: GSM) -> range:
    return range(1, len(model.aggregation.layers) + 1)


def _rows(seen: Recording, rows: int) -> range:
    """Return the indices of the last ``rows`` rows in their sequence."""
    length = seen["position"].shape[1]
    return range(length - rows, length)


def _panels(count: int, columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with ``count`` panels in ``columns`` columns, each ``height`` inches high."""
    figure, panels = plots.figure(columns, WIDTH / columns, height, grid=False, rows=-(-count // columns))
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _label_outer(panels: Sequence[Axes], columns: int) -> None:
    """Remove axis labels that the panel to the left or below repeats."""
    for number, axes in enumerate(panels):
        if number % columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        if number + columns < len(panels):
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
