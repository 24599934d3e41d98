"""Finished runs side by side: their table, paired differences and pictures, from the files in their folders."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsm import plots
from gsm.config.address import CONTENTS
from gsm.config.check import ConfigError, few, unknown, unlike
from gsm.config.command_line import listed, path_text
from gsm.experiments import rows
from gsm.experiments.board import board_lines, write_board
from gsm.experiments.curves import ByArm, Curves, minus_first, read_curves
from gsm.experiments.page import Picture, Report
from gsm.experiments.states import states
from gsm.experiments.table import (
    FOOTNOTE,
    USUAL,
    RunSummary,
    Table,
    known_columns,
    mapping,
    measured,
    names_of,
    read_contents,
    read_otherwise,
    read_runs,
    settings,
    summarise,
    told_apart,
)
from gsm.files import damage, write_whole
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.folder import is_held

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {"step": "optimizer step", "tokens": "tokens trained on"}
PANELS = 4  # largest number of columns in a picture of final values


def compare(
    *folders: str,
    columns: str = "",
    against: str = "",
    metric: str = "",
    axis: str = "step",
    x: str = "",
    y: str = "",
    output: str = "",
    publish: str = "",
) -> Table:
    """Print finished runs side by side, and write that with pictures to comparison.html, .md, .csv, .json and .png.

    Shown are the mean and the spread over the seeds of every arm, differences to the first arm seed by seed, learning
    curves, and which runs are not finished. Only arms of the first arm's task (data=) have differences. Every finished
    run counts; one with other settings than the first of its arm has a line of its own (results.md leaves those out).

    Args:
        folders: of experiments, logs/<name>; arms of one name in several of them get the experiment's name in front
        columns: keys of summary.json, dots go down: columns=val_loss,data.train_tokens; left out: the experiment's own
        against: the arm to compare the others with; left out: the first of an experiment, else that of most runs
        metric: of the learning curves, as in metrics.jsonl; left out: val/accuracy where there is one, else val/loss,
            and train/loss beside it
        axis: of the learning curves: step, or tokens (train/tokens, the number trained on up to a step)
        x: a key of summary.json for one more picture, in which every arm is a point: x=cache_bytes y=accuracy
        y: a key of summary.json, shown against x in that picture
        output: the folder to write to; left out: the experiment's, and for several the folder above all of them
        publish: a folder of rows, such as results: append a row for each run and tuning attempt to its <name>.csv

    Raises:
        ConfigError: no run is finished, or a name that the runs do not know.
        FileNotFoundError: a folder without runs.
        OSError: the comparison cannot be written; the error names the file.
    """
    if axis not in AXES:
        raise ConfigError(f"axis must be step or tokens, got {axis}")
    if bool(x) != bool(y):
        raise ConfigError(f"x and y must both be given, as x=cache_bytes y=accuracy, got x={x} y={y}")
    places = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    finished = [run for run in _collect(places) if run.finished]
    arms = list(dict.fromkeys(run.arm for run in finished))
    if against and against not in arms:
        raise unknown("arm", against, arms, "the finished runs")
    chosen = listed(columns) or _columns(places, finished)
    known = known_columns(finished)
    for column in [*chosen, *([x, y] if x else [])]:
        if column not in known:
            raise unknown("column", column, known, "the summaries")
    ordered = any(read_contents(place).get("arms") for place in places)  # else the arm of most runs is the first
    runs_of = Counter(run.arm for run in finished)
    arms.sort(key=lambda arm: (arm != against, 0 if ordered else -runs_of[arm]))
    table = summarise(finished, chosen, arms)
    table = replace(table, tuned=_tuned(table.runs))
    notes = [sentence for place in places if (sentence := damage(place / CONTENTS))]
    notes += [*unfinished(places), *apart(table.runs)]
    print("\n".join([table.text(), "", *table.verdicts(), *table.baselines(), FOOTNOTE, *table.meanings(), *notes, ""]))
    place = Path(output or (places[0] if len(places) == 1 else os.path.commonpath(places)))
    print("\n".join(write(table, place, places, notes=notes, metric=metric, axis=axis, x=x, y=y)))
    for folder in places if publish else []:
        known = read_runs(folder)
        if several := {run.arm for run in told_apart(known)} - {run.arm for run in known}:
            raise ConfigError(
                f"publish must be of arms with the same values in all seeds, got {', '.join(sorted(several))}"
            )
        print(rows.publish(folder, Path(publish), table.columns))
    return table


def _collect(folders: Sequence[Path]) -> list[RunSummary]:
    """Return all runs of these experiments, at least one of them finished.

    Raises ConfigError if none is finished, FileNotFoundError if there is none.
    """
    if not folders:
        raise ConfigError("compare.py needs the folder of an experiment, as python compare.py logs/ablate_residual")
    all_runs = _named(folders)
    if not any(run.finished for run in all_runs):
        where = " or ".join(map(path_text, folders))
        raise ConfigError(f"no run in {where} is finished: {'; '.join(unfinished(folders))}")
    return all_runs


def _named(folders: Sequence[Path]) -> list[RunSummary]:
    """Return all runs of these experiments, finished or not, in their order; arms of one name in several folders get
    the folder's name in front."""
    by_folder = {folder: _existing_runs(folder) for folder in folders}
    times = Counter(arm for runs in by_folder.values() for arm in {run.arm for run in runs})
    names, short = Counter(folder.name for folder in by_folder), plots.short(folder.name for folder in by_folder)
    all_runs = []
    for folder, runs in by_folder.items():
        before = short[folder.name] if names[folder.name] == 1 else path_text(folder)
        all_runs += [replace(run, arm=f"{before}/{run.arm}") if times[run.arm] > 1 else run for run in runs]
    return all_runs


def unfinished(folders: Sequence[Path]) -> list[str]:
    """Return a sentence for each run that is not finished: its last step, and the reason of its end."""
    return [f"not finished: {path_text(run)}, {state}" for run, state in _states(folders).items() if state]


def _states(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the state of every run's folder; empty for a finished run."""
    return {run.folder: "" if run.finished else _state(run) for folder in folders for run in read_runs(folder)}


def apart(runs: Sequence[RunSummary]) -> list[str]:
    """Return a sentence for each text that was read with several tokenizers, and for each arm whose runs differ in the
    data, steps or tokens from the first run of their task."""
    first = {run.task: run for run in reversed(runs)}
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        base = first[run.task]
        if changes := _changes(base, run):
            key = (run.arm, f"{base.arm} (seed {base.seed})", few(changes))
            seeds.setdefault(key, []).append(f"seed {run.seed}")
    return read_otherwise(runs) + [
        f"compare with care: {arm} ({', '.join(names)}) differs from {base} in {changes}"
        for (arm, base, changes), names in seeds.items()
    ]


def _changes(one: RunSummary, two: RunSummary) -> list[str]:
    """Return the differences between two runs: the content of their data, the number of steps, of tokens."""
    prints = [run.summary.get("fingerprint") or {} for run in (one, two)]
    changes = unlike(*prints) if all(prints) else []
    for key, amount in {"steps": "the steps", "tokens": "the tokens trained on"}.items():
        there, here = one.value(key), two.value(key)
        if there is not None and here is not None and there != here:
            changes.append(f"{amount} ({there:,.0f} there, {here:,.0f} here)")
    return changes


def write(
    table: Table,
    folder: Path,
    folders: Sequence[Path],
    stem: str = "comparison",
    notes: Sequence[str] = (),
    *,
    metric: str = "",
    axis: str = "step",
    x: str = "",
    y: str = "",
) -> list[str]:
    """Write a table with its pictures, each file whole or not at all; return sentences about the files.

    Args:
        table: of finished runs.
        folder: of the files.
        folders: of the experiments of the runs.
        stem: beginning of the names of the files.
        notes: sentences below the table.
        metric, axis, x, y: as in ``compare``.

    Raises:
        ConfigError: no run has such a metric, or two arms have one label.
        OSError: a file cannot be written; the error names it.
    """
    told = read_contents(folders[0]) if len(folders) == 1 else {}  # several experiments may name one arm otherwise
    labels = mapping(told.get("labels"))
    names = names_of([*(row.arm for row in table.rows), *mapping(told.get("arms"))], labels)
    shown = table.labelled(names, labels)
    by_arm = {row.arm: [run for run in table.runs if run.arm == row.arm] for row in table.rows}
    curves = read_curves(by_arm, axis)
    learned = {name: curves.get(name, {}) for name in _chosen(curves, metric)}
    metric = next(iter(learned))
    points = {arm: _points(runs, x, y) for arm, runs in by_arm.items()} if x else {}
    drawn: dict[str, Figure] = {}
    narrow: dict[str, Figure] = {}
    missing = ""
    try:
        named_runs = _renamed(by_arm, names)
        drawn |= _learning({name: _renamed(of, names) for name, of in learned.items()}, AXES[axis])
        drawn |= _panels(shown, named_runs)
        drawn |= states(named_runs, {name: _renamed(of, names) for name, of in curves.items()})
        if len(folders) == 1:
            narrow |= _values(shown, named_runs, "arms", 1)  # TensorBoard shows pictures small, and this one first
        if x:
            figure, (axes,) = plots.figure(height=3.2, width=5.2)
            plots.against(axes, _renamed(points, names), *(labels.get(key) or plots.label(key) for key in (x, y)))
            drawn[f"{y}_by_{x}"] = figure
    except ImportError as error:  # matplotlib is an extra; the numbers do not need it
        missing = str(error)
    pictures = {
        f"{stem}_{name}.png": Picture(plots.png(figure), plots.svg(figure, name)) for name, figure in drawn.items()
    }
    runs = [run for each in folders for run in read_runs(each)]
    report = Report(folder, folders, shown, names, notes, pictures, missing, runs, _states(folders))
    contents = {
        f"{stem}.md": report.markdown().encode(),
        f"{stem}.csv": table.csv().encode(),
        f"{stem}.json": (json.dumps({**table.plain(), "notes": list(notes)}, indent=2) + "\n").encode(),
        **{name: picture.png for name, picture in pictures.items()},
    }
    for name, content in contents.items():
        write_whole(folder / name, content)
    write_whole(folder / f"{stem}.html", report.html().encode())  # last: the others need no files beside the runs
    opened = []
    if len(folders) == 1:
        by_step = curves if axis == "step" else read_curves(by_arm)
        write_board(folder, by_step, stem, report.text(), narrow | drawn)
        opened = board_lines(folder, by_step)
    sentences = [missing] if missing else []
    bare = [arm for arm, found in learned[metric].items() if by_arm[arm] and not found]
    if bare and len(bare) < len(learned[metric]):
        sentences.append(f"not in the learning curves, as they lack {metric} by {axis}: {', '.join(bare)}")
    bare = [arm for arm, (across, _) in points.items() if by_arm[arm] and not across]
    if bare:
        sentences.append(f"not in the picture of {y} against {x}, as they lack one of the two: {', '.join(bare)}")
    sentences.append(f"written to {path_text(folder)}: {', '.join([f'{stem}.md, .csv, .json', *pictures])}")
    return [*sentences, f"all on one page, for a browser: {path_text(folder / f'{stem}.html')}", *opened]


def _renamed(by_arm: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[arm]: of for arm, of in by_arm.items()}


def _learning(learned: Mapping[str, Curves], across: str) -> Iterator[tuple[str, Figure]]:
    """Yield the picture with a panel for each metric, and one for the first metric as differences from the first
    arm."""
    panels = {plots.label(name): arms for name, arms in learned.items() if any(arms.values())}
    for name, arms in [*learned.items()][:1]:
        if arms and any((apart := minus_first(arms)).values()):
            panels[f"{plots.label(name)}\nminus {next(iter(arms))}, paired"] = apart
    if panels:
        figure, places = plots.figure(len(panels), height=3.2, width=4.6)
        for axes, (name, arms) in zip(places, panels.items(), strict=True):
            plots.curves(axes, {arm: list(runs.values()) for arm, runs in arms.items()}, across, name)
            if name not in map(plots.label, learned):
                axes.axhline(0, color="#888888", linewidth=1)
        plots.legend_below(places)
        yield "curves", figure


def _panels(table: Table, by_arm: ByArm) -> Iterator[tuple[str, Figure]]:
    """Yield the pictures with a panel for each column of the table, and for each task with several test lengths."""
    yield from _values(table, by_arm, "values", PANELS)
    tested = _tested(by_arm, "by_length")
    if tested:
        columns = min(2, len(tested))
        figure, panels = plots.figure(columns, width=3.8, height=2.6, rows=-(-len(tested) // columns))
        plots.lengths(panels, tested, "length of the word (letters)", "last state known (fraction)", top=1)
        yield "lengths", figure
    loaded = _tested(by_arm, "by_load")
    if loaded:
        figure, panels = plots.figure(len(loaded), height=1.1 + 0.22 * len(by_arm), grid=False)
        plots.cells(panels, loaded, "load (needles, tokens, times told)", "answered (fraction)")
        yield "loads", figure


def _values(table: Table, by_arm: ByArm, name: str, most: int) -> Iterator[tuple[str, Figure]]:
    """Yield the picture with a panel for each of the first columns of the table."""
    known = [column for column in table.columns if column not in table.empty_columns()][:most]
    if known and table.runs:
        lines = max(len(name.splitlines()) for name in plots.named(by_arm).values())
        figure, panels = plots.figure(columns=len(known), height=1.1 + (0.2 + 0.15 * lines) * len(by_arm))
        for axes, column in zip(panels, known, strict=True):
            plots.seeds(axes, {arm: _numbers(runs, column) for arm, runs in by_arm.items()}, table.heads[column])
        for axes in panels[1:]:
            axes.tick_params(labelleft=False)  # the arms are those of the first panel
        yield name, figure


def _tested(by_arm: ByArm, key: str) -> dict[str, dict[str, list[dict[int, float]]]]:
    """Return the fractions by length or load of a summary's ``key``, by task and arm, for every run."""
    tasks: dict[str, dict[str, list[dict[int, float]]]] = {}
    for arm, run in ((arm, run) for arm, runs in by_arm.items() for run in runs):
        for task, values in (run.summary.get(key) or {}).items():
            seed = {int(key): value for key, value in values.items() if key.isdecimal() and value is not None}
            tasks.setdefault(task, {name: [] for name in by_arm})[arm].append(seed)
    return tasks


def _chosen(curves: Mapping[str, Curves], metric: str) -> list[str]:
    """Return this metric; without one, that of validation and that of training.

    Raises ConfigError.
    """
    if metric and metric not in curves:
        raise unknown("metric", metric, curves, "metrics.jsonl")
    held_out = "val/accuracy" if "val/accuracy" in curves else "val/loss"
    return [metric] if metric else [held_out, *({"train/loss"} & curves.keys())]


def _numbers(runs: Sequence[RunSummary], column: str) -> list[float]:
    return [value for run in runs if (value := run.value(column)) is not None]


def _points(runs: Sequence[RunSummary], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return both numbers of each run that has both, the first one above 0 for a logarithmic axis."""
    pairs = [(run.value(x), run.value(y)) for run in runs]
    both = [(across, up) for across, up in pairs if across is not None and across > 0 and up is not None]
    return [across for across, _ in both], [up for _, up in both]


def _existing_runs(folder: Path) -> list[RunSummary]:
    """Return the runs of one experiment, arms in its own order. Raises FileNotFoundError if there is none."""
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must be that of an experiment, logs/<name>, got {path_text(folder)}")
    runs = read_runs(folder)
    if not runs:
        below = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir() and read_runs(path)))
        hint = f"the experiments below it are {below}" if below else "give that of an experiment, logs/<name>"
        raise FileNotFoundError(f"no run in {path_text(folder)} has a summary.json; {hint}")
    return runs


def _tuned(runs: Sequence[RunSummary]) -> dict[str, dict[str, str]]:
    """Return the values that the experiments of these runs have tuned their arms to, by their last commands."""
    by_arm = {}
    for run in runs:
        tuned = read_contents(run.experiment).get("tuned")
        values = tuned.get(run.summary.get("arm")) if isinstance(tuned, Mapping) else None
        if isinstance(values, Mapping):
            texts = {str(key): one.get("shown") if isinstance(one, Mapping) else None for key, one in values.items()}
            own = settings(run)  # a run of an earlier command, or with a value by hand, may have others
            by_arm[run.arm] = {
                key: str(text)
                for key, text in texts.items()
                if text is not None and own.get(key) in (None, str(text).partition(" ")[0])
            }
    return by_arm


def _columns(folders: Sequence[Path], runs: Sequence[RunSummary]) -> list[str]:
    """Return the columns of the experiments' own tables, else the usual ones; only those that a run has."""
    own = dict.fromkeys(column for folder in folders for column in read_contents(folder).get("table", ()))
    return measured(list(own or USUAL), runs) or measured(USUAL, runs) or ["steps"]


def _state(run: RunSummary) -> str:
    """Return the state of a run that is not finished."""
    if damaged := damage(run.folder / "summary.json"):
        return damaged
    status, steps, reason = (run.summary.get(key) for key in ("status", "steps", "reason"))
    if status is None:
        return "without a summary.json: it has ended before training began, or waits"
    place = run.experiment / run.parts.get(str(run.summary.get("run")), run.folder.resolve())
    how = "unfinished" if status == "running" and not is_held(place) else str(status)
    if run.summary.get("run"):
        return f"{how} in its run {run.summary['run']}{f': {reason}' if reason else ''}"
    if status == "running":  # a summary is written only when a run begins and when it ends, curves in between
        curves = read_metrics(run.curves).values()
        steps = max((step for curve in curves for step in curve), default=0) or steps
    return f"{how} at step {steps}{f': {reason}' if reason else ''}"
