"""What notebooks are made of: small trained models, finished runs, and pictures. Needs matplotlib:
``pip install -c constraints.txt -e '.[notebook]'``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsm import paths
from gsm.analysis import figures, views
from gsm.analysis.attention import attention_map
from gsm.analysis.rollout import Routes
from gsm.config.compose import compose
from gsm.config.load import build_model, instantiate, load_model, load_tokenizer, read_checkpoint, vetted_node
from gsm.costs.model import Cost, cost
from gsm.data.cache import cache_folder, locked, read_json
from gsm.data.synthetic import SyntheticData
from gsm.evaluation import plots
from gsm.experiments.compare import CONTENTS
from gsm.experiments.fit import train
from gsm.experiments.table import RunSummary, read_runs
from gsm.experiments.trials import Experiment
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.observe import Seen
from gsm.training.callbacks.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.3, 3.0  # inches of a picture as wide as a page


def trained(arm: str = "gsm", *overrides: str) -> tuple[LanguageModel, SyntheticData]:
    """A model of ``experiment=_notebook`` with its task: the one that comes with the package; with overrides, one that
    is found in the cache (``GSM_CACHE``), or trained now, which takes a few minutes and is done once.

    Args:
        arm: of ``configs/experiment/_notebook.yaml``.
        overrides: of the training, as on the command line.
    """
    packaged = paths.trained().get(f"needle_{arm}")
    if packaged and not overrides:
        return load(packaged)
    folder = cache_folder() / "notebook" / arm / "seed0"
    with locked(folder):  # another notebook may be training it
        if not any(run.finished and run.folder == folder for run in read_runs(folder.parents[1])):
            given = ["experiment=_notebook", "name=notebook", f"logs={folder.parents[2]}", "resume=never", *overrides]
            config = Experiment(compose(given), given).trial(arm, 0).config
            if config["start_from"]:  # another arm's weights
                trained(Path(config["start_from"]).parent.name, *overrides)
            print(f"Training {arm} for {config['trainer']['max_steps']} steps, once:", flush=True)
            train(config)
    return load(folder)


def load(folder: str | Path) -> tuple[LanguageModel, SyntheticData]:
    """The model of a checkpoint on a synthetic task, such as the run ``logs/<name>/<arm>/seed<k>``, in evaluation mode,
    with its task.

    Raises:
        ValueError: it was trained on text. FileNotFoundError, CheckpointError: as ``load_model``.
    """
    model, data = load_model(folder), vetted_node(read_checkpoint(folder, mmap=True), "data", folder)
    if "task" not in data:
        raise ValueError(f"{folder} was trained on text, but this notebook asks for needles: give a run on data=needle")
    return model, instantiate(data, "data")


def finished_runs(folder: str | Path | None = None) -> list[RunSummary]:
    """The finished runs of an experiment, ``logs/<name>``; left out: of the one that ended last, or where there is none
    at all, of the needle models that come with the package. Arms come in the experiment's order."""
    if folder is None:
        summaries = sorted(
            (paths.runs_home() / "logs").glob("*/*/seed*/summary.json"), key=lambda file: file.stat().st_mtime
        )
        folders = [file.parents[2] for file in summaries if any(run.finished for run in read_runs(file.parents[2]))]
        folder = folders[-1] if folders else paths.TRAINED / "needle"
    arms = list((read_json(Path(folder) / CONTENTS) or {}).get("arms", ()))
    runs = [run for run in read_runs(folder) if run.finished]
    return sorted(runs, key=lambda run: arms.index(run.arm) if run.arm in arms else len(arms))


def save(figure: Figure, name: str) -> list[Path]:
    """Writes a figure for print, as ``name.pdf`` and ``name.svg``, whose letters stay letters, and as ``name.png`` with
    300 dots an inch: ``notebook.save(notebook.show_state(model, seen), "figures/state")``."""
    import matplotlib

    files = [Path(f"{name}.{kind}") for kind in ("pdf", "svg", "png")]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        for file in files:
            figure.savefig(file, dpi=300)
    return files


def text(checkpoint: str | Path, source: str, tokens: int) -> Tensor:
    """The first so many tokens of a text, as the model of a checkpoint reads it, int64 [T]; errors as of
    ``gsm.load_model``."""
    return torch.tensor(load_tokenizer(checkpoint).encode(source)[:tokens])


def show_one(
    draw: Callable[..., None],
    *what: Any,
    width: float = WIDTH,
    height: float = HEIGHT,
    grid: bool = True,
    **options: Any,
) -> Figure:
    """One picture of ``gsm.analysis.figures`` or ``gsm.evaluation.plots``; their arguments but the axes."""
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
        import ipywidgets
        from IPython.display import display
    except ImportError:
        return draw(choices[0])
    slider, below = ipywidgets.SelectionSlider(options=list(choices), value=choices[0]), ipywidgets.Output()

    def show(number: int) -> None:
        figure = draw(number)  # outside, since an Output keeps errors to itself
        with below:
            below.clear_output(wait=True)
            display(figure)

    slider.observe(lambda change: show(change["new"]), names="value")
    show(choices[0])
    return ipywidgets.VBox([slider, below])


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


def show_costs(models: Sequence[str], size: str, lengths: Sequence[int], chunk: int = 4096) -> Figure:
    """What prefill, a decoded token and the cache cost, computed from the cost model: a picture of three panels.

    Args:
        models: variants of the group ``model``.
        size: of all of them.
        lengths: in tokens.
        chunk: tokens that a prefill reads at a time.
    """
    with torch.device("meta"):  # without memory for the weights
        costs = {name: cost(build_model(name, size)) for name in models}
    panels: dict[str, Callable[[Cost, int], float]] = {
        "prefill (GFLOP a token)": lambda one, tokens: one.prefill_flops(tokens, chunk).total() / tokens / 1e9,
        "decode (GB moved for a token)": lambda one, tokens: one.decode_bytes(tokens).total() / 1e9,
        "cache (MiB)": lambda one, tokens: one.cache_bytes(tokens).total() / 2**20,
    }
    figure, axes = plots.figure(len(panels), width=WIDTH / len(panels), height=HEIGHT)
    for one, (label, value) in zip(axes, panels.items(), strict=True):
        curves = {name: [{n: value(of, n) for n in lengths}] for name, of in costs.items()}
        plots.curves(one, curves, "tokens", label)
        one.set(xscale="log", yscale="log")
    return figure


def measurements() -> list[Path]:
    """Files of ``benchmark=inference``, this machine's (``logs/benchmarks``) and those of the repository
    (``benchmarks/results``); those with the most requests first, but before them those that have a picture."""
    folders = (paths.runs_home() / "logs/benchmarks", paths.ROOT / "benchmarks/results")
    found = {file: read_json(file) or {} for folder in folders for file in sorted(folder.glob("*.json"))}
    rows = {file: [row for row in _rows(content) if "decode" in row] for file, content in found.items()}
    drawn = {file: file.with_suffix(".png").is_file() for file in found}
    return sorted((file for file in found if rows[file]), key=lambda file: (not drawn[file], -len(rows[file])))


def measured(file: Path) -> list[Any]:
    """Pictures that a file of measurements has beside it: of what was measured, upon what the cost model says, then by
    itself. Where there are none, it is said what draws them."""
    files = [file.with_name(f"{file.stem}{kind}.png") for kind in ("-computed", "")]
    pictures = [picture(path.read_bytes()) for path in files if path.is_file()]
    if not pictures:
        print(f"no picture yet: python benchmark.py benchmark=inference results={file}")
    return pictures


def ruler_picture(folder: str | Path) -> Any:
    """How RULER's needles are answered by length, as an experiment that asked them left it (``logs/ablate_cot``); where
    there is none, that of the documentation."""
    file = Path(folder) / "ruler.png"
    if not file.is_file():
        print(f"no {file}: python train.py experiment=ablate_cot; below, the one of the documentation")
        file = paths.ROOT / "docs/cot.png"
    return picture(file.read_bytes())


def picture(content: bytes) -> Any:
    """A PNG as a notebook shows it."""
    from IPython.display import Image

    return Image(content, width=800)


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    rows = content.get("rows")
    return [row for row in rows.values() if isinstance(row, dict)] if isinstance(rows, dict) else []


def describe(seen: Seen) -> str:
    """A line for every tap: its name, its shape, its dtype."""
    width = max(map(len, seen), default=0)
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in seen.items()}
    return "\n".join(f"{name:<{width}}  {list(tensor.shape)!s:<20}  {kinds[name]}" for name, tensor in seen.items())


def show_attention(model: GSM, seen: Seen, names: Sequence[str]) -> Figure:
    """One map for each name (``encoder/3``, ``stage/1``, ``decoder/5``), two beside each other, of the first sequence:
    ``figures.attention``."""
    figure, panels = plots.figure(2, width=WIDTH / 2, height=HEIGHT, grid=False, rows=-(-len(names) // 2))
    for axes, name in zip(panels, names, strict=False):
        figures.attention(axes, attention_map(model, seen, name), name)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    return figure


def show_routes(routes: Routes, rows: Sequence[int], told: Sequence[int] = ()) -> Figure:
    """Where the entries of some rows come from, a panel for each way: ``figures.route_map``."""
    figure, panels = plots.figure(1, width=WIDTH, height=0.5 + 0.12 * len(rows), grid=False, rows=len(routes.names))
    for axes, way in zip(panels, routes.names, strict=True):
        figures.route_map(axes, routes, way, rows, told)
    for axes in panels[:-1]:
        axes.set_xlabel("")
    return figure


def show_increments(seen: Seen) -> Figure:
    """Lengths of the encoder's output e, of every stage's increment, and of z, by position."""
    figure, (axes,) = plots.figure(width=WIDTH, height=HEIGHT)
    names = ["state/e", *sorted(name for name in seen if name.endswith("/increment")), "state/z"]
    for name, style in plots.styles(names).items():
        axes.plot(seen[name][0].norm(dim=-1).cpu(), style.line, color=style.colour, label=name, linewidth=1.2)
    axes.set(xlabel="position (tokens)", ylabel="Euclidean length of the vector", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    return figure


def show_state(model: GSM, seen: Seen) -> Figure:
    """The decoder's attention over the shared state: a line a layer, a column an entry, the sink at the right."""
    return views.decoder(model, seen, width=WIDTH, height=2.2)


@torch.no_grad()
def show_memory(model: LanguageModel, token_T: Tensor, lengths: Sequence[int]) -> Figure:
    """What the model keeps after reading so many tokens, by kind, one kind upon the other.

    Args:
        model: any model.
        token_T: int64, at least as many as the longest.
        lengths: in tokens, ascending.
    """
    sizes = [model.prefill(token_T[:length], model.start(1)).memory.breakdown() for length in lengths]  # pyright: ignore[reportOptionalMemberAccess]
    figure, (axes,) = plots.figure(width=WIDTH, height=HEIGHT)
    kinds = sorted(sizes[-1], key=lambda kind: sizes[-1][kind] - sizes[0].get(kind, 0))  # what grows lies on top
    kept = [[size.get(kind, 0) / 1024 for size in sizes] for kind in kinds]
    axes.stackplot(lengths, kept, labels=[kind.replace("_", " ") for kind in kinds], colors=plots.COLOURS)
    axes.set(xlabel="tokens that were read", ylabel="kept (KiB)")
    axes.legend(frameon=False, reverse=True, loc="upper left", fontsize=8)
    return figure
