"""What notebooks are made of: small trained models, finished runs, and pictures. Needs matplotlib:
``pip install -e '.[notebook]'``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsm import paths
from gsm.benchmarks import inference, projection, projection_pictures
from gsm.callbacks.metrics_file import read_metrics
from gsm.data.cache import cache_folder, locked
from gsm.data.synthetic import SyntheticData
from gsm.eval import plots
from gsm.eval.attention import attention_map, decoder_attention
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.observe import Seen
from gsm.runs.compose import compose
from gsm.runs.experiment import Experiment
from gsm.runs.fit import train
from gsm.runs.load import instantiate, load_model, read_checkpoint
from gsm.runs.table import RunSummary, read_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.3, 3.0  # inches of a picture as wide as a page


def trained(arm: str = "gsm", *overrides: str) -> tuple[LanguageModel, SyntheticData]:
    """A model of ``experiment=notebook`` with its task: found in the cache (``GSM_CACHE``), or trained now, which takes
    a few minutes and is done once.

    Args:
        arm: ``gsm`` or ``delta_net``.
        overrides: of the training, should there be one, as on the command line.
    """
    folder = cache_folder() / "notebook" / arm / "seed0"
    with locked(folder):  # another notebook may be training it
        if not any(run.finished and run.folder == folder for run in read_runs(folder.parents[1])):
            given = ["experiment=notebook", f"logs={folder.parents[2]}", "resume=never", *overrides]
            train(Experiment(compose(given), given).job(arm, 0).config)
    return load(folder)


def load(folder: str | Path) -> tuple[LanguageModel, SyntheticData]:
    """The model of a run on a synthetic task, ``logs/<name>/<arm>/seed<k>``, in evaluation mode, with its task.

    Raises:
        ValueError: it was trained on text. FileNotFoundError, CheckpointError: as ``load_model``.
    """
    model, config = load_model(folder), read_checkpoint(folder, mmap=True)["hyper_parameters"]["config"]
    if "task" not in config["data"]:
        raise ValueError(f"{folder} was trained on text, but this notebook asks for needles: give a run on data=needle")
    return model, instantiate(config["data"], "data")


def finished_runs(folder: str | Path | None = None) -> list[RunSummary]:
    """The finished runs of an experiment, ``logs/<name>``; left out: of the one that ended last, or where there is none
    at all, of ``trained``."""
    if folder is None:
        summaries = sorted((paths.ROOT / "logs").glob("*/*/seed*/summary.json"), key=lambda file: file.stat().st_mtime)
        folders = [file.parents[2] for file in summaries if any(run.finished for run in read_runs(file.parents[2]))]
        folder = folders[-1] if folders else None
    if folder is None:
        for arm in ("gsm", "delta_net"):
            trained(arm)
        folder = cache_folder() / "notebook"
    return [run for run in read_runs(folder) if run.finished]


def show_one(
    draw: Callable[..., None],
    *what: Any,
    width: float = WIDTH,
    height: float = HEIGHT,
    grid: bool = True,
    **options: Any,
) -> Figure:
    """One picture of ``gsm.analysis.figures`` or ``gsm.eval.plots``: what is left of their arguments but the axes."""
    figure, (axes,) = plots.figure(width=width, height=height, grid=grid)
    draw(axes, *what, **options)
    return figure


def show_beside(draws: Sequence[Callable[[Axes], None]], height: float = HEIGHT, grid: bool = True) -> Figure:
    """Several pictures side by side; each is a function that draws on the axes that it is given."""
    figure, panels = plots.figure(len(draws), width=WIDTH / len(draws), height=height, grid=grid)
    for draw, axes in zip(draws, panels, strict=True):
        draw(axes)
    return figure


def explore(draw: Callable[[int], Figure], choices: Sequence[int]) -> Any:
    """The picture of one of several numbers: to be chosen with a slider where ipywidgets is installed, else that of the
    first."""
    try:
        import ipywidgets  # pyright: ignore[reportMissingImports]
    except ImportError:
        return draw(choices[0])
    return ipywidgets.interactive(draw, value=ipywidgets.SelectionSlider(options=list(choices), value=choices[0]))


def show_curves(runs: Sequence[RunSummary], metric: str = "val/loss") -> Figure:
    """Learning curves: a line an arm, the mean over its seeds, in a band of their standard deviation."""
    arms: dict[str, list[dict[Any, float]]] = {}
    for run in runs:
        found = read_metrics(run.folder / "metrics.csv").get(metric)
        arms.setdefault(run.arm, []).extend([dict(found)] if found else [])
    return show_one(plots.curves, arms, "optimizer step", plots.label(metric))


def show_values(runs: Sequence[RunSummary], columns: Sequence[str]) -> Figure:
    """Numbers of the summaries: a panel each, a row an arm, a dot a seed."""
    by_arm = {run.arm: [other for other in runs if other.arm == run.arm] for run in runs}
    figure, panels = plots.figure(len(columns), width=WIDTH / len(columns), height=1.1 + 0.35 * len(by_arm))
    for axes, column in zip(panels, columns, strict=True):
        values = {arm: [x for run in of_arm if (x := run.value(column)) is not None] for arm, of_arm in by_arm.items()}
        plots.seeds(axes, values, plots.label(column))
        axes.locator_params(axis="x", nbins=3)
    for axes in panels[1:]:
        axes.tick_params(labelleft=False)  # the arms are those of the first panel
    return figure


def show_costs(models: Sequence[str], size: str, lengths: Sequence[int], chunk: int = 4096) -> Any:
    """What prefill, a decoded token and the cache cost, computed from the cost model: a picture of three panels.

    Args:
        models: variants of the group ``model``.
        size: of all of them.
        lengths: in tokens.
        chunk: tokens that a prefill reads at a time.
    """
    costs = {name: projection.known_cost(name, size) for name in models}
    rows = [
        {"model": name, **projection.projected(cost, tokens, chunk)}
        for name, cost in costs.items()
        for tokens in lengths
    ]
    return picture(projection_pictures.projection(rows))


def measurements() -> list[Path]:
    """Files of ``benchmark=inference`` in ``benchmarks/results``, the latest first."""
    files = sorted((paths.ROOT / "benchmarks/results").glob("*.json"), key=lambda file: -file.stat().st_mtime)
    return [file for file in files if '"kind"' in (text := file.read_text(encoding="utf-8")) and '"decode"' in text]


def measured(file: Path) -> list[Any]:
    """Pictures of what was measured, with what the cost model says where there are enough points."""
    with tempfile.TemporaryDirectory() as folder:
        inference.run(results=str(shutil.copy(file, folder)))
        return [picture(path.read_bytes()) for path in sorted(Path(folder).glob("*.png"))]


def picture(content: bytes) -> Any:
    """A PNG as a notebook shows it."""
    from IPython.display import Image

    return Image(content, width=800)


def describe(seen: Seen) -> str:
    """A line for every tap: its name, its shape, its dtype."""
    width = max(map(len, seen), default=0)
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in seen.items()}
    return "\n".join(f"{name:<{width}}  {list(tensor.shape)!s:<20}  {kinds[name]}" for name, tensor in seen.items())


def show_attention(model: GSM, seen: Seen, names: Sequence[str]) -> Figure:
    """One map for each name (``encoder/3``, ``stage/1``, ``decoder/5``): a line a row, a column a position read.

    Each from 0 to its own maximum, on a square-root scale, so that small weights are seen: ``attention_map``.
    """
    figure, axes = plots.figure(len(names), width=3.2, height=3.4, grid=False)
    for axis, name in zip(axes, names, strict=True):
        axis.imshow(attention_map(model, seen, name).sqrt().cpu(), vmin=0, interpolation="nearest")
        axis.set(title=name, xlabel="position that is read")
    axes[0].set_ylabel("position that reads")
    return figure


def show_increments(seen: Seen) -> Figure:
    """Lengths of the encoder's output e, of every stage's increment, and of z, by position."""
    figure, (axis,) = plots.figure(width=7, height=3)
    stages = sorted(name for name in seen if name.endswith("/increment"))
    for name in ("state/e", *stages, "state/z"):
        axis.plot(seen[name][0].norm(dim=-1).cpu(), label=name, linestyle="--" if name == "state/z" else "-")
    axis.set(xlabel="position", ylabel="length of the vector", ylim=(0, None))
    axis.legend(frameon=False)
    return figure


def show_state(model: GSM, seen: Seen) -> Figure:
    """The decoder's attention over the shared state: a line a layer, a column an entry, the sink at the right."""
    weight_LE, first = decoder_attention(model, seen), model.geometry.encoder_layers + 1
    figure, (axis,) = plots.figure(width=7, height=2.2, grid=False)
    picture = axis.imshow(weight_LE.sqrt().cpu(), vmin=0, aspect="auto", interpolation="nearest")
    axis.set(xlabel="entry, from the oldest to the row's own; the sink", ylabel="decoder layer")
    axis.set_yticks(range(len(weight_LE)), [str(first + layer) for layer in range(len(weight_LE))])
    figure.colorbar(picture, label="square root of the weight")
    return figure


@torch.no_grad()
def show_memory(model: LanguageModel, token_T: Tensor, lengths: Sequence[int]) -> Figure:
    """Bytes that the model keeps after reading so many tokens, by kind, one kind upon the other.

    Args:
        model: any model.
        token_T: int64, at least as many as the longest.
        lengths: in tokens, ascending.
    """
    sizes = [model.prefill(token_T[:length], model.start(1)).memory.breakdown() for length in lengths]  # pyright: ignore[reportOptionalMemberAccess]
    figure, (axis,) = plots.figure(width=7, height=3)
    kinds = sorted(sizes[-1], key=lambda kind: sizes[-1][kind] - sizes[0].get(kind, 0))  # what grows lies on top
    axis.stackplot(
        lengths, [[size.get(kind, 0) for size in sizes] for kind in kinds], labels=[k.replace("_", " ") for k in kinds]
    )
    axis.set(xlabel="tokens that were read", ylabel="bytes")
    axis.legend(frameon=False, reverse=True, loc="upper left")
    return figure
