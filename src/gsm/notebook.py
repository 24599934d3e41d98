"""Functions for notebooks: small trained models, finished runs, and pictures. Needs matplotlib:
``pip install -c constraints.txt -e '.[notebook]'``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsm import paths, plots
from gsm.analysis import figures, views
from gsm.analysis.attention import attention_map
from gsm.analysis.rollout import Routes
from gsm.config.compose import compose, quoted
from gsm.config.load import build_model, instantiate, load_model, load_tokenizer, vetted_node
from gsm.config.stored import is_finished, read_checkpoint, started
from gsm.costs.model import Cost, cost
from gsm.data.cache import cache_folder
from gsm.data.synthetic import SyntheticData
from gsm.experiments.runs import Experiment
from gsm.experiments.table import RunSummary, list_trial, read_runs
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.observe import Recording, Taps
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.run import train

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.3, 3.0  # size of a page-wide picture, in inches


def trained(arm: str = "gsm", *overrides: str) -> tuple[LanguageModel, SyntheticData]:
    """Return a model of ``experiment=_notebook`` with its task.

    Without overrides it is the packaged model. With overrides it is trained once, which takes a few minutes, and then
    loaded from the cache (``GSM_CACHE``).

    Args:
        arm: an arm of ``configs/experiment/_notebook.yaml``.
        overrides: overrides of the training, as on the command line.
    """
    packaged = paths.trained().get(f"needle_{arm}")
    if packaged and not overrides:
        return load(packaged)
    arguments = ["experiment=_notebook", "name=notebook", f"logs={quoted(cache_folder())}", *overrides]
    experiment = Experiment(compose(arguments), arguments)
    trial = experiment.trial(arm, 0)
    list_trial(experiment.folder, trial.line())
    runs = list(trial.runs.values())
    for run in runs:
        assert run.config, "the arms of this experiment only train"
        if not run.finished():
            print(f"Training {run.label} for {run.config['trainer']['max_steps']} steps, once:", flush=True)
            train(run.config)  # waits where another notebook trains it
    return load(runs[-1].find_folder())


def load(folder: str | Path) -> tuple[LanguageModel, SyntheticData]:
    """Load the model of a checkpoint on a synthetic task, such as that of the run ``logs/<name>/<arm>-seed<k>``.

    Returns:
        The model, in evaluation mode, and its task.

    Raises:
        ValueError: it was trained on text. FileNotFoundError, CheckpointError: as ``load_model``.
    """
    model, data = load_model(folder), vetted_node(read_checkpoint(folder, weights=False), "data", folder)
    if "task" not in data:
        raise ValueError(
            f"folder must be of a run on a synthetic task, such as data=needle, got {folder}, trained on text"
        )
    return model, instantiate(data, "data")


def finished_runs(folder: str | Path | None = None) -> list[RunSummary]:
    """Return the finished runs of an experiment, ``logs/<name>``, with arms in the experiment's order.

    By default it is the experiment that ended last, or the packaged needle models if there is none.
    """
    if folder is None:
        runs = [
            file.parent for file in (paths.runs_home() / "logs").glob("*/*/summary.json") if is_finished(file.parent)
        ]
        folder = max(runs, key=started).parent if runs else paths.TRAINED / "needle"
    return [run for run in read_runs(folder) if run.finished]


def save(figure: Figure, name: str) -> list[Path]:
    """Write a figure for print: ``name.pdf`` and ``name.svg``, with text as text, and ``name.png`` at 300 dpi.

    Example: ``notebook.save(notebook.show_state(model, seen), "figures/state")``.
    """
    import matplotlib

    files = [Path(f"{name}.{kind}") for kind in ("pdf", "svg", "png")]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        for file in files:
            figure.savefig(file, dpi=300)
    return files


def text(checkpoint: str | Path, source: str, tokens: int) -> Tensor:
    """Return the first ``tokens`` tokens of a text with a checkpoint's tokenizer, int64 [T].

    Errors as in ``gsm.load_model``.
    """
    return torch.tensor(load_tokenizer(checkpoint).encode(source)[:tokens])


def show_one(draw: Callable[..., None], *arguments: Any, height: float = HEIGHT, **options: Any) -> Figure:
    """Draw one picture of ``gsm.analysis.figures`` or ``gsm.plots``; their arguments but the axes."""
    figure, (axes,) = plots.figure(width=WIDTH, height=height)
    draw(axes, *arguments, **options)
    return figure


def show_beside(draws: Sequence[Callable[[Axes], None]], height: float = HEIGHT, grid: bool = True) -> Figure:
    """Draw several pictures side by side; each is a function of its axes."""
    figure, panels = plots.figure(len(draws), width=WIDTH / len(draws), height=height, grid=grid)
    for draw, axes in zip(draws, panels, strict=True):
        draw(axes)
    return figure


def explore(draw: Callable[[int], Figure], choices: Sequence[int]) -> Any:
    """Show the picture of a number chosen with a slider; without ipywidgets, the picture of the first number."""
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        return draw(choices[0])
    slider, below = ipywidgets.SelectionSlider(options=list(choices), value=choices[0]), ipywidgets.Output()

    def show(number: int) -> None:
        figure = draw(number)  # outside of the block, because an Output hides errors
        with below:
            below.clear_output(wait=True)
            display(figure)

    slider.observe(lambda change: show(change["new"]), names="value")
    show(choices[0])
    return ipywidgets.VBox([slider, below])


def show_curves(runs: Sequence[RunSummary], metric: str = "val/loss") -> Figure:
    """Draw learning curves: one line per arm, the mean over its seeds, in a band from the lowest to the highest."""
    arms: dict[str, list[dict[Any, float]]] = {}
    for run in runs:
        values = read_metrics(run.curves).get(metric)
        arms.setdefault(run.arm, []).extend([dict(values)] if values else [])
    return show_one(plots.curves, arms, "optimizer step", plots.label(metric))


def show_values(runs: Sequence[RunSummary], columns: Sequence[str]) -> Figure:
    """Draw columns of the summaries: one panel per column, one row per arm, one dot per seed."""
    by_arm = {run.arm: [other for other in runs if other.arm == run.arm] for run in runs}
    figure, panels = plots.figure(len(columns), width=WIDTH / len(columns), height=1.1 + 0.35 * len(by_arm))
    for axes, column in zip(panels, columns, strict=True):
        values = {arm: [x for run in of_arm if (x := run.value(column)) is not None] for arm, of_arm in by_arm.items()}
        plots.seeds(axes, values, plots.label(column))
        axes.locator_params(axis="x", nbins=3)
    for axes in panels[1:]:
        axes.tick_params(labelleft=False)  # the first panel has the names of the arms
    return figure


def show_costs(models: Sequence[str], size: str, lengths: Sequence[int]) -> Figure:
    """Draw the cost model's numbers for prefill, a decoded token and the cache, in three panels.

    Args:
        models: variants of the group ``model``.
        size: size of all models.
        lengths: lengths in tokens.
    """
    with torch.device("meta"):  # without memory for the weights
        costs = {name: cost(build_model(name, size)) for name in models}
    panels: dict[str, Callable[[Cost, int], float]] = {
        "prefill (GFLOP per token)": lambda cost, tokens: cost.prefill_flops(tokens).total() / tokens / 1e9,
        "decode (GB moved per token)": lambda cost, tokens: cost.decode_bytes(tokens).total() / 1e9,
        "cache (MiB)": lambda cost, tokens: cost.cache_bytes(tokens).total() / 2**20,
    }
    figure, axes = plots.figure(len(panels), width=WIDTH / len(panels), height=HEIGHT)
    for panel, (label, value) in zip(axes, panels.items(), strict=True):
        curves = {name: [{n: value(of_model, n) for n in lengths}] for name, of_model in costs.items()}
        plots.curves(panel, curves, "tokens", label)
        panel.set(xscale="log", yscale="log")
    return figure


def picture(file: str | Path, command: str) -> Any:
    """Return the PNG of a file for display in a notebook; without one, print the command that draws it."""
    from IPython.display import Image

    if Path(file).is_file():
        return Image(Path(file).read_bytes(), width=800)
    print(f"no {file}: {command}")
    return None


def describe(seen: Recording) -> str:
    """Describe each recorded tap in one line: name, shape, dtype."""
    return str(Taps.of(seen))


def show_attention(model: GSM, seen: Recording, names: Sequence[str]) -> Figure:
    """Draw attention maps (``figures.attention``) of the first sequence, two in a row, one for each name
    (``encoder/3``, ``stage/1``, ``decoder/5``)."""
    figure, panels = plots.figure(2, width=WIDTH / 2, height=HEIGHT, grid=False, rows=-(-len(names) // 2))
    for axes, name in zip(panels, names, strict=False):
        figures.attention(axes, attention_map(model, seen, name), name)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    return figure


def show_routes(routes: Routes, rows: Sequence[int], needle_places: Sequence[int] = ()) -> Figure:
    """Draw the sources of the entries of some rows (``figures.route_map``), one panel per route."""
    figure, panels = plots.figure(1, width=WIDTH, height=0.5 + 0.12 * len(rows), grid=False, rows=len(routes.names))
    for axes, way in zip(panels, routes.names, strict=True):
        figures.route_map(axes, routes, way, rows, needle_places)
    for axes in panels[:-1]:
        axes.set_xlabel("")
    return figure


def show_increments(seen: Recording) -> Figure:
    """Draw the norms of the encoder's output e, of every stage's increment, and of z, by position."""
    figure, (axes,) = plots.figure(width=WIDTH, height=HEIGHT)
    names = ["state/e", *sorted(name for name in seen if name.endswith("/increment")), "state/z"]
    for name, style in plots.styles(names).items():
        axes.plot(seen[name][0].norm(dim=-1).cpu(), style.line, color=style.colour, label=name, linewidth=1.2)
    axes.set(xlabel="position (tokens)", ylabel="Euclidean length of the vector", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    return figure


def show_state(model: GSM, seen: Recording) -> Figure:
    """Draw the decoder's attention to the shared state: one line per layer, one column per entry, the sink on the
    right."""
    return views.decoder(model, seen, width=WIDTH, height=2.2)


@torch.no_grad()
def show_memory(model: LanguageModel, token_T: Tensor, lengths: Sequence[int]) -> Figure:
    """Draw the size of a model's memory by number of tokens, as stacked areas by kind.

    Args:
        model: any model.
        token_T: int64, at least as long as the largest length.
        lengths: lengths in tokens, ascending.
    """
    sizes = [model.prefill(token_T[:length], model.start(1)).memory.breakdown() for length in lengths]  # pyright: ignore[reportOptionalMemberAccess]
    figure, (axes,) = plots.figure(width=WIDTH, height=HEIGHT)
    kinds = sorted(sizes[-1], key=lambda kind: sizes[-1][kind] - sizes[0].get(kind, 0))  # growing kinds on top
    kibibytes = [[size.get(kind, 0) / 1024 for size in sizes] for kind in kinds]
    axes.stackplot(lengths, kibibytes, labels=[kind.replace("_", " ") for kind in kinds], colors=plots.COLOURS)
    axes.set(xlabel="tokens read", ylabel="memory (KiB)")
    axes.legend(frameon=False, reverse=True, loc="upper left", fontsize=8)
    return figure
