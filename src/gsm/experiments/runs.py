"""The runs of a configuration: one ``Run`` for each process that trains or measures, composed before any starts.

``gsm.experiments.execute`` lists and starts them.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gsm import paths
from gsm.checkpoint import CheckpointError
from gsm.config import command_line
from gsm.config.address import address, changed, find, hashed, moved, noted, origin
from gsm.config.check import ConfigError, flat
from gsm.config.compose import compose, quoted, refuse_unnamed
from gsm.config.stored import digest, is_finished
from gsm.evaluation import commands
from gsm.evaluation.measure import Measure
from gsm.evaluation.ruler import Ruler
from gsm.experiments import SEVERAL
from gsm.experiments.entries import (
    OWN,
    Entry,
    is_group,
    key_of,
    naming,
    parse_runs,
    read_arms,
    read_chosen,
    read_keys,
)
from gsm.experiments.table import USUAL, RunSummary, Table, measured, names_of, read_runs, read_trial, summarise
from gsm.files import read_json, write_json
from gsm.training.folder import finished as training_finished
from gsm.training.run import open_data
from gsm.training.trainer import refuse_early


@dataclass(frozen=True, eq=False)
class Run:
    """One process that trains or measures.

    Attributes:
        experiment: the folder ``logs/<name>``; that of another experiment, if that has trained it.
        label: begins the name of its folder.
        address: ends it: a hash of all values that decide its result.
        program: train or evaluate.
        arguments: of the program.
        after: the run that it takes weights from; None: it waits for nothing.
        config: composed; None: it measures.
        checkpoint: the weights that it measures.
        words: arguments of evaluate.py that it measures with, without the checkpoint.
    """

    experiment: Path
    label: str
    address: str
    program: str
    arguments: tuple[str, ...] = ()
    after: Run | None = None
    config: Mapping[str, Any] | None = field(default=None, repr=False)
    checkpoint: Path | None = None
    words: tuple[str, ...] = ()

    def find_folder(self) -> Path:
        """Return the folder that has its address now; without one, that which it will make."""
        return find(self.experiment, self.address) or self.experiment / f"{self.label}-{self.address}"

    @property
    def command(self) -> tuple[str, ...]:
        """The command of its process, as words."""
        return (sys.executable, *paths.script(self.program), *self.arguments)

    @property
    def typed(self) -> str:
        """The same, to paste into a shell."""
        return command_line.command(self.program, *self.arguments)

    def find_log(self) -> Path:
        """Return the file for its output."""
        return self.find_folder() / f"{self.program}.log"

    @property
    def measure(self) -> Measure:
        """The measure that its words ask for. Raises ConfigError."""
        return commands.parse(self.words)

    def finished(self) -> bool:
        """Return whether its results are there. Raises ConfigError if the data have changed since it was trained."""
        if config := self.config:
            return training_finished(config, lambda: open_data(config).fingerprint())
        known = read_json(self.find_folder() / "summary.json") or {}
        with contextlib.suppress(CheckpointError, FileNotFoundError):  # the run itself raises it, with the remedy
            return known.get("status") == "finished" and known.get("checkpoint") == digest(self.checkpoint)
        return False

    def conclude(self) -> None:
        """Write the summary of a measurement; a training writes its own. Raises OSError."""
        if self.checkpoint:
            facts = {"status": "finished", "command": list(self.words), "checkpoint": digest(self.checkpoint)}
            measure, folder = self.measure, self.find_folder()
            write_json(folder / "summary.json", {**facts, "metrics": measure.metrics(measure.read(folder, {}))})

    def fail(self, status: str, reason: str) -> None:
        """Write its status and the reason, unless its process has done so. Raises OSError."""
        known = read_json(self.find_folder() / "summary.json") or {}
        if known.get("status") in (None, "running"):
            write_json(self.find_folder() / "summary.json", {**known, "status": status, "reason": reason})


@dataclass(frozen=True, eq=False)
class Trial:
    """One arm with one seed: a line of the table.

    Attributes:
        config: composed; its runs have it, each with changes of its own.
        overrides: that it was composed from.
        runs: by name; a single one has no name. Trials that need the same run share it.
    """

    arm: str
    seed: int
    config: Mapping[str, Any] = field(repr=False)
    overrides: tuple[str, ...] = field(repr=False)
    runs: dict[str, Run] = field(default_factory=dict)

    def finished(self) -> bool:
        """Return whether all of its runs have come to their end."""
        return all(run.finished() for run in self.runs.values())

    def summary(self) -> RunSummary:
        """Return what its runs have measured so far."""
        return read_trial(Path(self.config["folder"]).parent, self.line())

    def line(self) -> dict[str, Any]:
        """Return it as a line of the experiment's list of trials."""
        here = Path(self.config["folder"]).parent
        places = {name: os.path.relpath(run.find_folder(), here) for name, run in self.runs.items()}
        return {"arm": self.arm, "seed": self.seed, "runs": places}


def in_order(trials: Iterable[Trial]) -> list[Run]:
    """Return all runs of trials in the order in which they start: each once, behind the run that it waits for."""
    return list(dict.fromkeys(run for trial in trials for run in trial.runs.values()))


class Experiment:
    """The arms and seeds that one command trains.

    Args:
        config: the parent's composed configuration.
        given: the overrides on the parent's command line, without Hydra's own.
        flags: overrides of Hydra's own, for the command of each run.

    Attributes:
        arms: all arms by name, with their overrides.
        chosen: the names of those to train.
        seeds: to train them with.
        labels: of arms and columns on pages, as given.
        names: of all arms on pages.
        columns: of the table; by default those of ``USUAL`` that its runs have.
        tune: the values to try, see `gsm.experiments.tune`; empty for none.

    Raises:
        ConfigError: arms, seeds, runs or table cannot be used.
    """

    def __init__(self, config: Mapping[str, Any], given: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
        typed, keys = {key_of(line) for line in given}, read_keys(config)
        if {"seed", "seeds"} <= typed:
            raise ConfigError(f"seed or seeds must be left out, got seed={config['seed']} and seeds={config['seeds']}")
        self.config, self.given, self.flags = config, given, flags
        self.arms = read_arms(keys.arms or {str(config["arm"]): []})
        self.labels = keys.labels or {}
        self.names = names_of(self.arms, self.labels)
        self.chosen = read_chosen(config["arm"], self.arms) if "arm" in typed else list(self.arms)
        seeds = [config["seed"]] if keys.seeds is None or "seed" in typed else keys.seeds
        self.seeds, self.columns, self.tune = list(dict.fromkeys(seeds)), keys.table or list(USUAL), keys.tune or {}
        self._trials: dict[tuple[str, ...], Trial] = {}  # by overrides
        self._runs: dict[str, Run] = {}  # by address
        self._configs: dict[tuple[str, ...], dict[str, Any]] = {}
        self._yamls = paths.digest(paths.config_folders())  # one state of them for all runs

    @property
    def folder(self) -> Path:
        """``logs/<name>``."""
        return Path(self.config["logs"]) / str(self.config["name"])

    def with_arms(self, arms: Mapping[str, list[str]]) -> Experiment:
        """Return the experiment with these arms alone, and with other overrides."""
        other = copy.copy(self)
        other.arms, other._trials, other._runs = dict(arms), {}, {}
        other.chosen = [arm for arm in self.chosen if arm in arms]
        return other

    def trials(self) -> list[Trial]:
        """Return the chosen arms, seed by seed, so that arms can be compared early. Raises ConfigError, for any arm."""
        for arm in self.arms:
            self.trial(arm, self.seeds[0])
        return [self.trial(arm, seed) for seed in self.seeds for arm in self.chosen]

    def trial(self, arm: str, seed: int) -> Trial:
        """Return one arm with one seed. Raises ConfigError, which names the arm, and the run of it."""
        with naming(f"arm {arm}"):
            return self.build(arm, seed, self.overrides(arm, seed))

    def build(
        self, arm: str, seed: int, overrides: tuple[str, ...], pick: Callable[[list[Entry]], list[Entry]] = list
    ) -> Trial:
        """Return the trial of these overrides with its runs, always the same one. Raises ConfigError.

        Args:
            arm: that it belongs to.
            seed: in the overrides.
            overrides: to compose it from.
            pick: returns the entries of ``runs`` that it has, changed or not.
        """
        if overrides not in self._trials:
            trial = Trial(arm, seed, self._composed(overrides), overrides)
            self._add_runs(trial, pick)
            self._trials[overrides] = trial
        return self._trials[overrides]

    def overrides(self, arm: str, seed: int, values: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the overrides of an arm with a seed, and with further values. Those of the user come last."""
        first = [line for line in self.given if key_of(line) in ("experiment", "runs")]  # which arms may change
        last = [line for line in self.given if line not in first and key_of(line).partition(".")[0] not in OWN]
        one = [f"{key}=null" for key in SEVERAL]  # or a run would be an experiment itself
        one += [f"arm={quoted(arm)}", f"seed={seed}", f"name={quoted(self.config['name'])}"]
        return (*first, *one, *self.arms[arm], *values, *last)

    def table(self, rows: Iterable[str]) -> Table:
        """Return the table of all finished runs of this configuration, of this command or another, by arms ``rows``.

        An arm that was not chosen is left out, unless it has a run.
        """
        runs = [run for run in read_runs(self.folder) if run.finished and run.arm in self.arms]
        own = [run for run in runs if self.trial(run.arm, run.seed).line()["runs"] == run.parts]
        shown = {*self.chosen, *(run.arm for run in own)}
        return summarise(own, self.columns_of(own), [arm for arm in rows if arm in shown])

    def columns_of(self, runs: Sequence[RunSummary]) -> list[str]:
        """Return the columns of a table of these runs."""
        return self.columns if self.config["table"] else measured(self.columns, runs) or self.columns

    def _add_runs(self, trial: Trial, pick: Callable[[list[Entry]], list[Entry]]) -> None:
        """Add every run of a trial."""
        entries = trial.config["runs"]
        if entries is None:
            trial.runs[""] = self._shared(
                Run(*_place(trial.config), "train", (*trial.overrides, *self.flags), None, trial.config)
            )
            return
        checkpoints: dict[str | None, str] = {}
        for entry in pick(parse_runs(entries)):
            after, path = trial.runs.get(entry.after or ""), checkpoints.get(entry.after)
            if entry.checkpoint:
                checkpoints[entry.name] = entry.checkpoint
            elif entry.measures:
                trial.runs[entry.name] = self._evaluation(trial, entry, path, after)
            else:
                trial.runs[entry.name] = self._training(trial, entry, path, after)

    def _training(self, trial: Trial, entry: Entry, path: str | None, after: Run | None) -> Run:
        """Return a run that trains, from a checkpoint or after another run."""
        start = path or (str(after.find_folder()) if after else None)
        words = [*_without(trial.overrides, entry.lines, start), "runs=null", *entry.lines]
        label = f"{trial.config['label']}-{entry.name}"
        words.append(f"label={quoted(label)}")
        with naming(f"run {entry.name}"):
            config = self._composed([*words, *([f"start_from={quoted(path)}"] if path else [])])
        if after:
            assert after.config, "`parse_runs` takes no run after one that measures"
            config = changed(config, start_from=start, origin=origin(after.config))
        config = _trained_elsewhere(config) or config
        words += [f"start_from={quoted(start)}"] if start else []
        return self._shared(Run(*_place(config), "train", (*words, *self.flags), after, config))

    def _evaluation(self, trial: Trial, entry: Entry, path: str | None, after: Run | None) -> Run:
        """Return a run that measures a checkpoint, or the end of another run."""
        begins, place = after.address if after else digest(path), Path(trial.config["folder"]).parent
        digits, label = hashed([entry.lines, begins]), f"{trial.config['label']}-{entry.name}"
        if digits in self._runs:
            return self._runs[digits]
        start, folder = (
            path or (after.find_folder() if after else ""),
            Run(place, label, digits, "evaluate").find_folder(),
        )
        chosen, _ = commands.choose(entry.lines)
        prefix = "ruler." if chosen is Ruler else ""
        words = (*entry.lines, f"checkpoint={start}", f"{prefix}output={folder}")
        return self._shared(Run(place, label, digits, "evaluate", words, after, None, Path(start), entry.lines))

    def _shared(self, run: Run) -> Run:
        """Return the first run with this address. Raises ConfigError where its data lie at another path: their contents
        do not enter the address."""
        first = self._runs.setdefault(run.address, run)
        if first.config and run.config:
            there, here = (flat(one) for one in (first.config, run.config))
            for key in run.config["address"]["paths"]:
                if there.get(key) != here.get(key):
                    raise ConfigError(
                        f"{key} must end in another name for other data, got {here.get(key)} beside {there.get(key)}"
                    )
        return first

    def _composed(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return a configuration that can be trained, and loaded from its checkpoint. Raises ConfigError."""
        if (key := tuple(overrides)) not in self._configs:
            config = compose(overrides, digest=self._yamls)
            refuse_unnamed(config)
            if config.get("runs") is None:
                refuse_early(config)
            self._configs[key] = config
        return self._configs[key]


def _place(config: Mapping[str, Any]) -> tuple[Path, str, str]:
    """Return the folder of the experiment of a configuration, its label, and its address."""
    return Path(config["folder"]).parent, str(config["label"]), address(config)


def _trained_elsewhere(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the configuration of a run with the folder of a finished run of the same address, of another experiment in
    the same ``logs`` and with data at the same path. None without one, or where it has begun in its own experiment."""
    own = Path(config["folder"])
    for folder in () if own.is_dir() else sorted(own.parent.parent.glob(f"*/*-{address(config)}")):
        there, here = flat(noted(folder)), flat(config)
        if is_finished(folder) and all(there.get(key) == here.get(key) for key in config["address"]["paths"]):
            return moved(config, str(own), str(folder))
    return None


def _without(overrides: Sequence[str], lines: Sequence[str], start: str | None) -> list[str]:
    """Return the overrides of a trial that a run with these lines keeps: all but the runs, the checkpoint to start from
    if the run has one, and keys below a group that the run chooses."""
    groups = [key.replace("/", ".") for line in lines if is_group(key := key_of(line))]
    reset = {"runs", *(["start_from"] if start else [])}

    def holds(line: str) -> bool:
        key = key_of(line).replace("/", ".")
        below = any(key == group or key.startswith(f"{group}.") for group in groups)
        return not (below or key.partition(".")[0] in reset)

    return [line for line in dict.fromkeys(overrides) if holds(line)]
