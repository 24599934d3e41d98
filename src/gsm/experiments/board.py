"""An experiment in TensorBoard beside its runs: one curve for each arm, the results' tables as text, its pictures.

For an arm `dense`, the run `dense-seed-mean` has ``mean/<metric>``, the mean over the seeds of every ``val/<metric>``,
and ``minus_<first arm>/<metric>``, the mean of the paired differences. They are made from the runs' metrics.jsonl, and
written anew with every table. The address of `gsm.training.report` gives it the colour of the arm's seeds.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from torch.utils.tensorboard.writer import SummaryWriter

from gsm import plots
from gsm.config.command_line import path_text, typed
from gsm.experiments.curves import Curve, Curves, minus_first
from gsm.training.callbacks.tensorboard import LAYOUT
from gsm.training.report import board

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD_OUT = "val/"  # begins the metrics that have curves by arm
END = "-seed-mean"  # ends the name of an arm's run
TABS = ("loss", "state")  # of LAYOUT: their charts are there by arm too
PINNED = ("accuracy", "bits_per_byte", "loss")  # the metric to see first: of these the first that there is


def write_board(folder: Path, curves: Mapping[str, Curves], stem: str, text: str, drawn: Mapping[str, Figure]) -> None:
    """Write the means, the differences, the tables and the pictures of an experiment, in place of earlier ones.

    Args:
        folder: of the experiment.
        curves: by metric (``read_curves``); of each the first arm is the one to compare with.
        stem: name of the run with tables and pictures.
        text: the tables, Markdown.
        drawn: the pictures, by name.

    Raises OSError where a file cannot be written.
    """
    for file in (file for name in (f"*{END}", stem) for file in folder.glob(f"{name}/events.out.tfevents.*")):
        file.unlink()
        with contextlib.suppress(OSError):  # there is something else in it
            file.parent.rmdir()
    by_arm: dict[str, dict[str, Curve]] = {}
    held_out = {name: of for name, of in curves.items() if name.startswith(HELD_OUT)}
    for arm, tag, curve in _tagged(held_out):
        by_arm.setdefault(arm, {})[tag] = curve
    # The same charts for every arm, also the first, which has no difference: TensorBoard shows them as it meets them.
    arms = _charts(first=next(iter(by_arm), ""), tags={tag for by_tag in by_arm.values() for tag in by_tag})
    for arm, by_tag in by_arm.items():
        with _writer(folder / f"{quote(arm, safe=' ()=,')}{END}") as writer:
            for tag, curve in by_tag.items():
                for step, value in curve.items():
                    writer.add_scalar(tag, value, int(step))
            writer.add_custom_scalars({"arms": arms})
    with _writer(folder / stem) as writer:
        writer.add_text(stem, text)
        for name, figure in drawn.items():
            writer.add_image(f"{stem}/{name}", plots.pixels(figure), dataformats="HWC")


def board_lines(folder: Path, curves: Mapping[str, Curves]) -> list[str]:
    """Return three lines: the command that starts TensorBoard, the address that opens it with means, differences and
    seeds on top, and a warning."""
    name = next((name for name in PINNED if HELD_OUT + name in curves), PINNED[-1])
    known = list(dict.fromkeys(tag for _, tag, _ in _tagged({HELD_OUT + name: curves.get(HELD_OUT + name, {})})))
    tags = [*known, HELD_OUT + name]
    return [
        f"its arms in TensorBoard: {typed('tensorboard', '--logdir', path_text(folder))}",
        board(*tags),
        "turn off 'Ignore outliers' there: TensorBoard leaves the lowest and the highest points out of a chart",
    ]


def _tagged(curves: Mapping[str, Curves]) -> Iterator[tuple[str, str, Curve]]:
    """Yield the arm, the tag and the curve of each mean and each difference."""
    for metric, by_arm in curves.items():
        first, name = next(iter(by_arm), ""), metric.removeprefix(HELD_OUT)
        for group, of in (("mean", by_arm), (f"minus_{first}", minus_first(by_arm))):
            for arm, seeds in of.items():
                steps, values = plots.together(list(seeds.values()))
                if steps:
                    yield arm, f"{group}/{name}", dict(zip(steps, map(statistics.fmean, values), strict=True))


def _charts(first: str, tags: Any) -> dict[str, list[Any]]:
    """Return the charts of CUSTOM SCALARS for the arms' curves."""
    charts = {}
    for title, patterns in ((title, patterns) for tab in TABS for title, patterns in LAYOUT[tab].items()):
        for group, how in (("mean", "mean over seeds"), (f"minus_{first}", f"difference from {first}, paired")):
            own = [f"{re.escape(group)}/{p.removeprefix(HELD_OUT)}" for p in patterns if p.startswith(HELD_OUT)]
            if any(re.match(pattern, tag) for pattern in own for tag in tags):
                charts[f"{title}: {how}"] = ["Multiline", own]
    return charts


def _writer(folder: Path) -> SummaryWriter:
    """Return the writer of a run. It makes an open TensorBoard forget the earlier content of this run."""
    return SummaryWriter(str(folder), purge_step=0)
