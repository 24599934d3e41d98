"""The states of an experiment's arms side by side, as their runs have measured them on a few held-out sequences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gsm import plots
from gsm.analysis import figures
from gsm.experiments.curves import ByArm, Curves
from gsm.training.callbacks.pictures import FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 3  # panels beside one another
SHOWN = {  # metrics with a panel each: its label
    r"val/state/share/(\w+)": "share of {} in the state",
    r"val/without_(\w+)": "loss added without {}\n(nats per token)",
}


def states(by_arm: ByArm, curves: Mapping[str, Curves]) -> Iterator[tuple[str, Figure]]:
    """Yield the pictures for which the runs have numbers: the shares of the state and the loss without it, a panel for
    each quantity; and the entries that the decoder of each arm reads.

    Args:
        by_arm: runs by arm.
        curves: of these runs, by metric (``curves.read_curves``).

    Raises ImportError without matplotlib.
    """
    shown = {
        label.format(re.sub(r"(\d+)", r" \1", match[1])): of
        for pattern, label in SHOWN.items()
        for metric, of in curves.items()
        if (match := re.fullmatch(pattern, metric))
    }
    if shown:
        columns = min(COLUMNS, len(shown))
        figure, panels = plots.figure(columns, 3.2, 1.1 + 0.3 * len(by_arm), rows=-(-len(shown) // columns))
        for number, (axes, (label, of)) in enumerate(zip(panels, shown.items(), strict=False)):
            last = {arm: [run[max(run)] for run in runs.values()] for arm, runs in of.items()}
            plots.seeds(axes, last, label)
            axes.tick_params(labelleft=number % columns == 0)
        for axes in panels[len(shown) :]:
            axes.remove()
        yield "state", figure
    if read := _read(by_arm):
        yield "decoder_reads", _decoders(read)


def _read(by_arm: ByArm) -> dict[str, tuple[Any, Any, Any]]:
    """Return what the decoder of each arm reads, the mean over the seeds, with its layers and distances."""
    read = {}
    for arm, runs in by_arm.items():
        files = [file for run in runs if (file := run.folder / FILE).is_file()]
        found = [dict(np.load(file, allow_pickle=False)) for file in files]
        if found and len({one["decoder_reads"].shape for one in found}) == 1:
            mean_LE = np.mean([one["decoder_reads"] for one in found], axis=0)
            read[arm] = mean_LE, found[0]["layers"], found[0]["back"]
    return read


def _decoders(read: Mapping[str, tuple[Any, Any, Any]]) -> Figure:
    """Return a panel for each arm, all on one scale, up to the 99th percentile of the entries' weights."""
    columns = min(COLUMNS, len(read))
    figure, panels = plots.figure(columns, 3.2, 2.4, grid=False, rows=-(-len(read) // columns))
    most = figures.bright_end([torch.from_numpy(weight_LE[:, :-1]) for weight_LE, _, _ in read.values()])
    for axes, (arm, (weight_LE, layers, back_W)) in zip(panels, read.items(), strict=False):
        rows = [int(layer) for layer in layers]
        name = plots.named(read)[arm]
        drawn = torch.from_numpy(weight_LE), torch.from_numpy(back_W)
        figures.state_read(axes, *drawn, rows, "decoder layer", most, name)
    for axes in panels[len(read) :]:
        axes.remove()
    figures.colour_bar(figure, panels[: len(read)], figures.WEIGHT, extend="max")
    return figure
