"""The runs of a configuration: one ``Run`` for each process that trains or measures, composed before any starts.

``gsm.experiments.execute`` lists and starts them.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gsm import paths
from gsm.checkpoint import CheckpointError, is_model
from gsm.config.check import ConfigError
from gsm.config.compose import compose, quoted, refuse_unnamed
from gsm.config.load import checkpoint_folder, digest
from gsm.evaluation import commands
from gsm.evaluation.checkpoints import TRAINED
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
    read_columns,
    read_seeds,
)
from gsm.experiments.table import Table, read_runs, summarise
from gsm.files import read_json, write_json
from gsm.training import folder, weights
from gsm.training.run import open_data
from gsm.training.trainer import refuse_early


@dataclass(frozen=True, eq=False)
class Run:
    """One process that trains or measures.

    Attributes:
        name: its folder below the experiment's, such as ``gsm/seed0/train``; no other run has it.
        folder: with its ``summary.json``.
        command: as words.
        after: the run that it takes weights from; None: it waits for nothing.
        config: composed; None: it measures.
        checkpoint: the weights that it measures.
        words: arguments of evaluate.py that it measures with, without the checkpoint.
    """

    name: str
    folder: Path
    command: tuple[str, ...]
    after: Run | None = None
    config: Mapping[str, Any] | None = field(default=None, repr=False)
    checkpoint: Path | None = None
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}  {os.path.relpath(self.folder)}  {shlex.join(self.command)}"

    @property
    def log(self) -> Path:
        """The file for its output."""
        return self.folder / ("evaluate.log" if self.config is None else "train.log")

    @property
    def measure(self) -> Measure:
        """The measure that its words ask for. Raises ConfigError."""
        return commands.parse(self.words)

    def finished(self) -> bool:
        """Return whether its results are there, and those of all runs before it. A run with a broken checkpoint is not
        finished: started again, it names the remedy."""
        if self.after and not self.after.finished():
            return False
        if self.checkpoint:
            known = read_json(self.folder / "summary.json") or {}
            there = known.get("status") == "finished" and is_model(checkpoint_folder(self.checkpoint))
            return there and self._measured().items() <= known.items()
        try:
            config = self.config
            return config is not None and folder.finished(config, lambda: open_data(config).fingerprint())
        except (CheckpointError, FileNotFoundError) as error:  # its own, or the one that it started from
            print(f"{self.name} was finished, but cannot be used: {error}", flush=True)
            return False

    def conclude(self) -> None:
        """Write the summary of a measurement; a training writes its own. Raises OSError."""
        if self.checkpoint:
            facts = {"status": "finished", **self._measured(), "metrics": self.measure.metrics_in(self.folder)}
            write_json(self.folder / "summary.json", facts)

    def _measured(self) -> dict[str, Any]:
        return {"command": list(self.words), "checkpoint": digest(self.checkpoint)}


@dataclass(frozen=True, eq=False)
class Trial:
    """One arm with one seed: a line of the table.

    Attributes:
        config: composed; all of its runs have it.
        overrides: that it was composed from.
        runs: by name; a single one without a name trains in the trial's own folder.
    """

    arm: str
    seed: int
    config: Mapping[str, Any] = field(repr=False)
    overrides: tuple[str, ...] = field(repr=False)
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """With its summary."""
        return Path(self.config["folder"])

    def finished(self) -> bool:
        """Return whether all of its runs have come to their end."""
        return all(run.finished() for run in self.runs.values())

    def note(self, **facts: Any) -> None:
        """Write its state so far; a single run writes all by itself. Raises OSError."""
        if "" in self.runs:
            return
        names = {"experiment": self.config["name"], "arm": self.arm, "seed": self.seed}
        # The facts of a training that arms share have the name of the first arm.
        summary = {"reason": None, **facts, **names, TRAINED: self._trained()}
        if read_json(self.folder / "summary.json") != summary:
            write_json(self.folder / "summary.json", summary)

    def conclude(self) -> None:
        """Write the summary of its last training, with the metrics of every evaluation. Raises OSError."""
        if "" in self.runs:
            return
        summaries = {name: read_json(run.folder / "summary.json") or {} for name, run in self.runs.items()}
        where = {name: os.path.relpath(run.folder, self.folder) for name, run in self.runs.items()}
        trained = self._trained()
        facts = dict(summaries[trained[-1]]) if trained else {}
        for name, summary in summaries.items():
            facts |= {f"{name}/{key}": value for key, value in summary.get("metrics", {}).items()}
        runs = {name: {**summaries[name], "folder": where[name]} for name in self.runs}
        curves = where[trained[0]] if trained else ""
        self.note(**{**facts, "status": "finished", "runs": runs, "curves": curves, "run": None})

    def _trained(self) -> list[str]:
        return [name for name, run in self.runs.items() if run.config is not None]


def in_order(trials: Iterable[Trial]) -> list[Run]:
    """Return all runs of trials in the order in which they start: each once, behind the run that it waits for."""
    ordered: dict[Run, None] = {}
    for run in [run for trial in trials for run in trial.runs.values()]:
        chain = [run]
        while chain[0].after:  # it may be a run of an arm that was not chosen
            chain.insert(0, chain[0].after)
        ordered |= dict.fromkeys(chain)
    return list(ordered)


class Experiment:
    """The arms and seeds that one command trains.

    Args:
        config: the parent's composed configuration.
        given: the overrides on the parent's command line, without Hydra's own.
        script: the command that trains one run, as words; overrides are added to it.

    Attributes:
        arms: all arms by name, with their overrides.
        chosen: the names of those to train.
        seeds: to train them with.
        columns: of the table.

    Raises:
        ConfigError: arms, seeds, runs or table cannot be used.
    """

    def __init__(self, config: Mapping[str, Any], given: Sequence[str] = (), script: Sequence[str] = ()) -> None:
        keys = {key_of(line) for line in given}
        if "folder" in keys:
            raise ConfigError(
                "folder must be left out, as an experiment has several runs: logs= or name= choose their place"
            )
        if {"seed", "seeds"} <= keys:
            raise ConfigError(f"seed or seeds must be left out, got seed={config['seed']} and seeds={config['seeds']}")
        self.config, self.given, self.script = config, given, script
        self.arms = read_arms(config["arms"]) if config["arms"] is not None else {str(config["arm"]): []}
        self.chosen = read_chosen(config["arm"], self.arms) if "arm" in keys else list(self.arms)
        one_seed = config["seeds"] is None or "seed" in keys
        self.seeds = [config["seed"]] if one_seed else read_seeds(config["seeds"])
        self.columns = read_columns(config["table"])
        self._trials: dict[tuple[str, ...], Trial] = {}  # by overrides
        self._configs: dict[tuple[str, ...], dict[str, Any]] = {}  # composing takes a third of a second

    @property
    def folder(self) -> Path:
        """``logs/<name>``."""
        return Path(self.config["logs"]) / str(self.config["name"])

    @property
    def held(self) -> Path:
        """The folder that no other command may work on: the experiment's, or that of a single arm and seed."""
        single = all(self.config[key] is None for key in SEVERAL)
        return self.trial(self.chosen[0], self.seeds[0]).folder if single else self.folder

    def with_arms(self, arms: Mapping[str, list[str]]) -> Experiment:
        """Return the experiment with these arms alone, and with other overrides."""
        other = copy.copy(self)
        other.arms, other._trials = dict(arms), {}
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
        last = [line for line in last if line != "resume=never"]  # which the parent obeys, once
        one = [f"{key}=null" for key in SEVERAL]  # or a run would be an experiment itself
        one += [f"arm={quoted(arm)}", f"seed={seed}", f"name={quoted(self.config['name'])}"]
        return (*first, *one, *self.arms[arm], *values, *last)

    def table(self, rows: Iterable[str]) -> Table:
        """Return the table of all finished runs of this configuration, of this command or another, by arms ``rows``."""
        runs = [run for run in read_runs(self.folder) if run.finished and run.arm in self.arms]
        return summarise([run for run in runs if self.trial(run.arm, run.seed).finished()], self.columns, list(rows))

    def _add_runs(self, trial: Trial, pick: Callable[[list[Entry]], list[Entry]]) -> None:
        """Add every run of a trial, or the run of another arm that trains the same."""
        config, entries = trial.config, trial.config["runs"]
        if entries is None:
            command, after = (*self.script, *trial.overrides), self._trained_in(config)
            trial.runs[""] = Run(self._name(trial.folder), trial.folder, command, after, config)
            return
        weights_of: dict[str | None, Path] = {}
        for entry in pick(parse_runs(entries)):
            start, after = weights_of.get(entry.after), trial.runs.get(entry.after or "")
            if entry.checkpoint:
                weights_of[entry.name] = checkpoint_folder(entry.checkpoint)
            elif entry.measures:
                assert start, "`parse_runs` takes no evaluation without weights"
                trial.runs[entry.name] = self._evaluation(trial.folder / entry.name, entry, start, after)
            else:
                trial.runs[entry.name] = self._training(trial, entry, start, after)
                weights_of[entry.name] = trial.runs[entry.name].folder

    def _training(self, trial: Trial, entry: Entry, start: Path | None, after: Run | None) -> Run:
        """Return a run that trains; arms with runs of one name that train the same share that of the first of them."""
        place = trial.folder / entry.name
        overrides = [*_without(trial.overrides, entry.lines, start), "runs=null", *entry.lines]
        overrides += [f"folder={quoted(place)}", *([f"start_from={quoted(start)}"] if start else [])]
        with naming(f"run {entry.name}"):
            config = self._composed(overrides)
        after, command = after or self._trained_in(config), (*self.script, *overrides)
        for arm in self._before(trial.arm):
            other = self.trial(arm, trial.seed).runs.get(entry.name)
            if other and other.config and other.after is after and _trains(other.config) == _trains(config):
                return other
        return Run(self._name(place), place, command, after, config)

    def _evaluation(self, place: Path, entry: Entry, start: Path, after: Run | None) -> Run:
        chosen, _ = commands.choose(entry.lines)
        prefix, output = "ruler." if chosen is Ruler else "", place if chosen.takes_folder else place / chosen.file
        words = (*entry.lines, f"checkpoint={start}", f"{prefix}output={output}")
        command = (sys.executable, *paths.script("evaluate"), *words)
        return Run(self._name(place), place, command, after, checkpoint=start, words=entry.lines)

    def _trained_in(self, config: Mapping[str, Any]) -> Run | None:
        """Return the run, of an arm before, that trains the weights that another one starts from."""
        if not config.get("start_from"):
            return None
        wanted = Path(config["start_from"])
        named = re.match(r"([^/]+)/seed(\d+)(?:/|$)", os.path.relpath(wanted, self.folder))
        if not named or named[1] not in self._before(config["arm"]):
            return None
        runs = self.trial(named[1], int(named[2])).runs.values()
        return next((run for run in runs if run.config and run.folder in (wanted, *wanted.parents)), None)

    def _before(self, arm: str) -> list[str]:
        """Return the arms that stand before this one in the experiment."""
        arms = [*self.arms]
        return arms[: arms.index(arm)]

    def _composed(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return a configuration that can be trained, and loaded from its checkpoint. Raises ConfigError."""
        if (key := tuple(overrides)) not in self._configs:
            config = compose(overrides)
            refuse_unnamed(config)
            if config.get("runs") is None:
                refuse_early(config)
            self._configs[key] = config
        return self._configs[key]

    def _name(self, place: Path) -> str:
        return os.path.relpath(place, self.folder)


def _trains(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all that decides the weights of a run: its configuration, where it starts, and whether as a branch."""
    return folder.identity({**config, "start_from": None}), config.get("start_from"), weights.is_branch(config)


def _without(overrides: Sequence[str], lines: Sequence[str], start: Path | None) -> list[str]:
    """Return the overrides of a trial that hold for a run with these lines: not the keys that the run sets, nor those
    below a group that the run chooses itself."""
    groups = [key.replace("/", ".") for line in lines if is_group(key := key_of(line))]
    reset = {"runs", "folder", *(["start_from"] if start else [])}

    def holds(line: str) -> bool:
        key = key_of(line).replace("/", ".")
        below = any(key == group or key.startswith(f"{group}.") for group in groups)
        return not (below or key.partition(".")[0] in reset)

    return [line for line in dict.fromkeys(overrides) if holds(line)]
