"""Functions for notebooks: small trained models, finished runs, and pictures.

Install matplotlib and Jupyter with ``pip install -c constraints.txt -e '.[notebook]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsm import paths, plots
from gsm.analysis import figures, views
from gsm.analysis.attention import attention_map
from gsm.analysis.needles import Asked
from gsm.analysis.rollout import Routes
from gsm.analysis.state import state_facts
from gsm.config.check import unknown
from gsm.config.compose import compose, quoted
from gsm.config.load import build_model, load_model, load_tokenizer
from gsm.config.stored import is_finished, read_checkpoint, started
from gsm.costs.model import Cost, Parts, cost
from gsm.data.base import DataModule
from gsm.data.cache import cache_folder
from gsm.data.recall import Task
from gsm.evaluation.held_out import open_data
from gsm.experiments.runs import Experiment
from gsm.experiments.table import RunSummary, known_columns, list_trial, read_runs
from gsm.explorer.words import questions_of, tokens
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM, check_gsm
from gsm.observe import Recording, Taps, record
from gsm.tables import grid_text, number_text
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.run import train

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.3, 3.0  # size of a page-wide picture, in inches


def trained(arm: str = "gsm", *overrides: str) -> tuple[LanguageModel, DataModule]:
    """Return a trained model of ``experiment=_notebook`` with its data, as ``load`` does.

    Without overrides it is the packaged model, if there is one for the arm. Otherwise the first call trains it, which
    takes a few minutes, and later calls load it from the cache (``GSM_CACHE``).

    Args:
        arm: an arm of ``configs/experiment/_notebook.yaml``.
        overrides: overrides of the training, as on the command line.

    Raises:
        ValueError: there is no such arm.
        ConfigError: an override is invalid.
    """
    packaged = paths.trained().get(f"needle_{arm}")
    if packaged and not overrides:
        return load(packaged)
    arguments = ["experiment=_notebook", "name=notebook", f"logs={quoted(cache_folder())}", *overrides]
    experiment = Experiment(compose(arguments), arguments)
    if arm not in experiment.arms:
        raise ValueError(f"arm must be one of {', '.join(experiment.arms)}, got {arm!r}")
    trial = experiment.trial(arm, 0)
    list_trial(experiment.folder, trial.line())
    runs = list(trial.runs.values())
    for run in runs:
        assert run.config, "the arms of this experiment only train"
        if not run.finished():
            print(f"Training {run.label} for {run.config['trainer']['max_steps']} steps, once:", flush=True)
            train(run.config)  # waits if another notebook trains the same run
    return load(runs[-1].find_folder())


def load(folder: str | Path) -> tuple[LanguageModel, DataModule]:
    """Load a trained model and its data.

    Args:
        folder: the folder of a run, such as ``logs/<name>/<arm>-seed<k>``, or another checkpoint.

    Returns:
        The model, in evaluation mode, and its data, with held-out sequences (``ask``); a synthetic task is in
        ``data.task``.

    Raises:
        FileNotFoundError, CheckpointError: as in ``load_model``.
        ConfigError: the data cannot be opened, for example because the text is no longer there.
    """
    return load_model(folder), open_data(read_checkpoint(folder, weights=False))


def ask(data: DataModule, sequences: int = 16) -> Asked:
    """Return held-out sequences with what is asked in them: the answers of a task, or every next token of a text.

    Args:
        data: the data of a run, as ``load`` returns them.
        sequences: number of sequences, the first ones of validation. Analyses read each as one document.
    """
    rows = list(islice(data.validation(), sequences))
    token_BT, target_BT = (torch.stack([row[name] for row in rows]) for name in ("tokens", "targets"))
    return Asked(token_BT, target_BT)


def finished_runs(folder: str | Path | None = None) -> list[RunSummary]:
    """Return the finished runs of an experiment, with arms in the order of the experiment.

    Args:
        folder: ``logs/<name>``; None: the experiment of the finished run that started last, or the packaged needle
            models if there is none.

    Raises:
        FileNotFoundError: no run in the folder has finished.
    """
    if folder is None:
        runs = [
            file.parent for file in (paths.runs_home() / "logs").glob("*/*/summary.json") if is_finished(file.parent)
        ]
        folder = max(runs, key=started).parent if runs else paths.TRAINED / "needle"
    finished = [run for run in read_runs(folder) if run.finished]
    if not finished:
        raise FileNotFoundError(f"folder must be of an experiment with a finished run, as logs/<name>, got {folder}")
    return finished


def save(figure: Figure, name: str) -> list[Path]:
    """Write a figure for print as ``name.pdf`` and ``name.svg``, with selectable text, and ``name.png`` at 300 dpi.

        notebook.save(notebook.show_state(model, seen), "figures/state")

    Returns:
        The three files.
    """
    import matplotlib

    files = [Path(f"{name}.{kind}") for kind in ("pdf", "svg", "png")]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        for file in files:
            figure.savefig(file, dpi=300)
    return files


def text(checkpoint: str | Path, source: str, tokens: int) -> Tensor:
    """Return the first ``tokens`` tokens of a text by the tokenizer of a checkpoint, int64 [T].

    Raises:
        FileNotFoundError, CheckpointError: as in ``gsm.load_model``.
    """
    return torch.tensor(load_tokenizer(checkpoint).encode(source)[:tokens])


def words(named: LanguageModel | DataModule | Task | None, source: str | Tensor) -> list[str]:
    """Return the texts of tokens for the axes of pictures: ``the``, ``K8``, ``V3``.

    A key that is asked about is ``K8?``. Spaces and line breaks become visible signs.

    Args:
        named: a model with a tokenizer, the data of a run, or a synthetic task; None: the tokens become plain numbers.
        source: a text, or tokens, int64 [T].

    Raises:
        ValueError: ``source`` is a text, and there is no tokenizer.
    """
    namer = (named.task or named.tokenizer) if isinstance(named, DataModule) else named
    task = None if isinstance(namer, LanguageModel) else namer
    asked = {question.key for question in questions_of(task, source)} if isinstance(source, Tensor) else set()
    signs = str.maketrans({"\n": "↵", " ": "·", "\t": "→", "$": r"\$"})  # matplotlib reads formulas between dollars
    signs |= dict.fromkeys(range(0x2400, 0x2440), "�")  # missing in matplotlib's font
    written = [word.translate(signs) for word in tokens(namer, source)]
    return [word + "?" if place in asked else word for place, word in enumerate(written)]


def arms(folder: str | Path, seed: int | None = None) -> dict[str, tuple[LanguageModel, DataModule]]:
    """Load a model of each arm of an experiment with its data, as ``load`` does.

    Args:
        folder: ``logs/<name>``.
        seed: seed of the runs; None: the first finished run of each arm.

    Raises:
        FileNotFoundError: no run has finished, or none with this seed.
    """
    runs = {run.arm: run for run in reversed(finished_runs(folder)) if seed in (None, run.seed)}
    if not runs:
        raise FileNotFoundError(f"seed must be that of a finished run in {folder}, got {seed}")
    return {arm: load(runs[arm].folder) for arm in reversed(runs)}


class States(dict[str, dict[str, float]]):
    """The result of ``compare_states``: numbers by model and by name, printed as a table."""

    def __repr__(self) -> str:
        columns = list(dict.fromkeys(column for facts in self.values() for column in facts))
        head = ["model", *(column.removeprefix("state/").replace("_", " ") for column in columns)]
        rows = ([name, *(number_text(facts.get(column)) for column in columns)] for name, facts in self.items())
        return grid_text([head, *rows])


def compare_states(models: Mapping[str, GSM], token_BT: Tensor) -> States:
    """Return numbers about the states of several models for the same text.

    Args:
        models: by name.
        token_BT: int64; each sequence is one document.

    Returns:
        By model: ``state/norm``, the mean Euclidean length of z; ``state/effective_rank`` of the state that the last
        row sees; and for a model with stages ``state/share/encoder`` and ``state/share/stage<s>``, the shares of z by
        route.

    Raises:
        ValueError: a model is no GSM.
    """
    states = States()
    for name, model in models.items():
        check_gsm(model, f"{name} ({type(model).__name__})")
        with torch.no_grad(), model.evaluating(), record("position", "state/*", "stage/*/increment") as seen:
            model.forward(token_BT)
        states[name] = state_facts(model, seen) | views.shares(model, seen)
    return states


def show_one(draw: Callable[..., None], *arguments: Any, height: float = HEIGHT, **options: Any) -> Figure:
    """Draw one picture on a new figure.

    Args:
        draw: a function of ``gsm.analysis.figures`` or ``gsm.plots``.
        arguments, options: its arguments after the axes.
        height: height of the figure in inches.
    """
    figure, (axes,) = plots.figure(width=WIDTH, height=height)
    draw(axes, *arguments, **options)
    return figure


def show_beside(draws: Sequence[Callable[[Axes], None]], height: float = HEIGHT, grid: bool = True) -> Figure:
    """Draw several pictures side by side, at most three in a row; each function of ``draws`` takes its axes."""
    columns = min(3, len(draws))
    figure, panels = plots.figure(columns, WIDTH / columns, height, grid, rows=-(-len(draws) // columns))
    for draw, axes in zip(draws, panels, strict=False):
        draw(axes)
    for axes in panels[len(draws) :]:
        axes.set_visible(False)
    return figure


def explore(draw: Callable[[int], Figure], choices: Sequence[int], labels: Sequence[str] = ()) -> Any:
    """Show a slider, and below it the picture of the chosen number; without ipywidgets, the picture of the first.

    Args:
        draw: returns the picture of a number.
        choices: the numbers.
        labels: what the slider shows for each of them, such as tokens; empty: the numbers.
    """
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        return draw(choices[0])
    options = list(zip(labels or map(str, choices), choices, strict=True))
    slider, below = ipywidgets.SelectionSlider(options=options, value=choices[0]), ipywidgets.Output()

    def show(change: Any) -> None:
        with below:  # an error is shown in place of the picture
            below.clear_output(wait=True)
            display(draw(change["new"]))

    slider.observe(show, names="value")
    first = draw(choices[0])  # outside of the block, so that the cell raises an error
    with below:
        display(first)
    return ipywidgets.VBox([slider, below])


def show_curves(runs: Sequence[RunSummary], metric: str = "val/loss") -> Figure:
    """Draw learning curves: per arm a line, the mean over its seeds, and a band from the lowest to the highest seed.

    If no run has two values of the metric, as after a single validation, draw the training loss instead.

    Raises:
        ConfigError: no run has this metric.
    """
    arms: dict[str, list[dict[Any, float]]] = {}
    known = {"val/loss", "train/loss"}  # a run may have none of them
    for run in runs:
        curves = read_metrics(run.curves)
        known |= curves.keys()
        arms.setdefault(run.arm, []).extend([dict(values)] if (values := curves.get(metric)) else [])
    if metric not in known:
        raise unknown("metric", metric, known, "metrics.jsonl")
    if metric != "train/loss" and max((len(seed) for seeds in arms.values() for seed in seeds), default=0) < 2:
        return show_curves(runs, "train/loss")
    return show_one(plots.curves, arms, "optimizer step", plots.label(metric))


def show_values(runs: Sequence[RunSummary], columns: Sequence[str]) -> Figure:
    """Draw columns of ``summary.json``: one panel per column, one row per arm, one dot per seed.

    Raises:
        ConfigError: no run has a number in one of the columns.
    """
    known = known_columns(runs)
    for column in columns:
        if column not in known:
            raise unknown("column", column, known, "the summaries")
    by_arm = {run.arm: [other for other in runs if other.arm == run.arm] for run in runs}
    figure, panels = plots.figure(len(columns), width=WIDTH / len(columns), height=1.1 + 0.35 * len(by_arm))
    for axes, column in zip(panels, columns, strict=True):
        values = {arm: [x for run in of_arm if (x := run.value(column)) is not None] for arm, of_arm in by_arm.items()}
        plots.seeds(axes, values, plots.label(column))
        axes.locator_params(axis="x", nbins=3)
    for axes in panels[1:]:
        axes.tick_params(labelleft=False)  # the first panel shows the names of the arms
    return figure


def show_costs(models: Sequence[str], size: str, lengths: Sequence[int]) -> Figure:
    """Draw the cost of prefill, of a decoded token, of its decoder's part, and of the cache, in four panels.

    Args:
        models: variants of the config group ``model``.
        size: size of all models.
        lengths: lengths in tokens.
    """
    with torch.device("meta"):  # allocates no weights
        costs = {name: cost(build_model(name, size)) for name in models}
    panels: dict[str, Callable[[Cost, int], float]] = {
        "prefill (GFLOP per token)": lambda cost, tokens: cost.prefill_flops(tokens).total() / tokens / 1e9,
        "decode (GB moved per token)": lambda cost, tokens: cost.decode_bytes(tokens).total() / 1e9,
        "by its decoder (MB moved per token)": lambda cost, tokens: _of_decoder(cost.decode_bytes(tokens)) / 1e6,
        "cache (MiB)": lambda cost, tokens: cost.cache_bytes(tokens).total() / 2**20,
    }
    figure, axes = plots.figure(2, width=WIDTH / 2, height=0.85 * HEIGHT, rows=2)
    for panel, (label, value) in zip(axes, panels.items(), strict=True):
        curves = {name: [{n: value(of_model, n) for n in lengths}] for name, of_model in costs.items()}
        plots.curves(panel, curves, "tokens", label)
        plots.by_length(panel, lengths)
        panel.set_yscale("log")
        plots.plain_numbers(panel.yaxis)
    plots.legend_below(axes)
    return figure


def _of_decoder(parts: Parts) -> float:
    """Return the sum over the decoder's layers."""
    return sum(value for name, value in parts.items() if name.startswith("decoder/"))


def picture(file: str | Path, command: str) -> Any:
    """Return a PNG file for display in a notebook; if it does not exist, print the command that draws it."""
    from IPython.display import Image

    if Path(file).is_file():
        return Image(Path(file).read_bytes(), width=800)
    print(f"no {file}: {command}")
    return None


def describe(seen: Recording) -> str:
    """Return one line for each recorded tap: name, shape, dtype."""
    return str(Taps.of(seen))


def show_attention(
    model: LanguageModel,
    seen: Recording,
    names: Sequence[str],
    words: Sequence[str] = (),
    heads: Sequence[int | None] = (None,),
) -> Figure:
    """Draw attention maps of the first sequence with one colour scale, two in a row.

    Args:
        model: the recorded model, of any kind.
        seen: a recording as for ``attention.attention_map``, which also defines the errors.
        names: one map for each of these layers and stages: ``encoder/3``, ``stage/1``, ``decoder/5``.
        words: texts of the tokens, for the axes.
        heads: one map for each of these heads; None is the mean over heads.
    """
    maps = {
        name if head is None else f"{name}, head {head}": attention_map(model, seen, name, head=head)
        for name in names
        for head in heads
    }
    highest, rows = figures.bright_end(list(maps.values())), -(-len(maps) // 2)
    figure, panels = plots.figure(2, width=WIDTH / 2, height=0.95 * WIDTH / 2, grid=False, rows=rows)
    for axes, (title, map_RT) in zip(panels, maps.items(), strict=False):
        figures.attention(axes, map_RT, title, words, highest)
    for axes in panels[len(maps) :]:
        axes.set_visible(False)
    figures.colour_bar(figure, panels[: len(maps)], "weight", extend="max")
    return figure


def show_routes(
    routes: Routes, rows: Sequence[int], needle_places: Sequence[int] = (), words: Sequence[str] = ()
) -> Figure:
    """Draw the sources of the state entries of some rows, one panel per route; see ``figures.route_map``."""
    figure, panels = plots.figure(1, width=WIDTH, height=0.6 + 0.14 * len(rows), grid=False, rows=len(routes.names))
    for axes, way in zip(panels, routes.names, strict=True):
        figures.route_map(axes, routes, way, rows, needle_places, words)
    for axes in panels[:-1]:
        axes.set_xlabel("")
        axes.tick_params(labelbottom=False)
    figures.colour_bar(figure, panels, "share of the entry")
    return figure


def show_states(states: States) -> Figure:
    """Draw the result of ``compare_states``: one row per model, and panels for the length of z, the effective rank, and
    the shares of z."""
    figure, panels = plots.figure(3, width=WIDTH / 3, height=1.3 + 0.25 * len(states))
    numbers = {"state/norm": "length of z", "state/effective_rank": "effective rank"}
    for axes, (name, label) in zip(panels, numbers.items(), strict=False):
        values = {model: [facts[name]] if name in facts else [] for model, facts in states.items()}
        plots.seeds(axes, values, label)
        axes.set_xlim(0, None)
    figures.shares(panels[2], states, "share of z")
    for axes in panels[1:]:
        axes.tick_params(labelleft=False)  # the first panel shows the names of the models
    return figure


def show_increments(seen: Recording, words: Sequence[str] = ()) -> Figure:
    """Draw the norms of the encoder's output e, of every stage's increment, and of z, by position.

    Args:
        seen: a recording of ``state/e``, ``state/z`` and ``stage/*/increment``.
        words: texts of the tokens, for the axis.
    """
    figure, (axes,) = plots.figure(width=WIDTH, height=HEIGHT)
    names = ["state/e", *sorted(name for name in seen if name.endswith("/increment")), "state/z"]
    for name, style in plots.styles(names).items():
        axes.plot(seen[name][0].norm(dim=-1).cpu(), style.line, color=style.colour, label=name, linewidth=1.2)
    axes.set_ylim(0, None)
    if words:
        plots.tokens(axes.xaxis, words)
    plots.finish(axes, "" if words else "position (tokens)", "Euclidean length of the vector")
    return figure


def show_state(model: GSM, seen: Recording) -> Figure:
    """Draw the decoder's attention to the shared state: one line per layer, one column per entry, at last the sink.

    The colour scale is linear, up to the 99th percentile of the entries' weights.

    Raises:
        ValueError: the model is no GSM.
    """
    return views.decoder(model, seen, WIDTH, 2.2)


@torch.no_grad()
def show_memory(model: LanguageModel, token_T: Tensor, lengths: Sequence[int]) -> Figure:
    """Draw the size of a model's memory against the number of tokens, as stacked areas by kind.

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
    axes.legend(frameon=False, reverse=True, fontsize=8, **plots.RIGHT)
    return figure
