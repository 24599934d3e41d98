"""The runs of a configuration: one ``Run`` for each process that trains or measures, composed before any starts.

``python train.py ... --cfg runs`` prints them, ``expand`` returns them, ``gsm.experiments.execute`` starts them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.compose import compose, quoted, refuse_unnamed
from gsm.config.load import CheckpointError, checkpoint_file, digest, instantiate
from gsm.config.naming import label
from gsm.evaluation import commands
from gsm.evaluation.checkpoints import TRAINED
from gsm.evaluation.measure import Measure
from gsm.evaluation.ruler import Ruler
from gsm.experiments.entries import (
    OWN,
    Entry,
    is_group,
    key_of,
    parse_runs,
    read_arms,
    read_chosen,
    read_columns,
    read_seeds,
)
from gsm.experiments.table import RunSummary, Table, read_runs, summarise
from gsm.experiments.tune import OPTUNA, Choice, Grid, Study, Values, ends, lines, read_tune, search
from gsm.files import read_json, write_json
from gsm.training import folder, weights
from gsm.training.trainer import refuse_early

TUNING = ".tuning"  # in an experiment's folder; nothing that looks for runs looks there
JOURNAL = "optuna.jsonl"


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
        return commands.asked(self.words)

    @property
    def diverged(self) -> bool:
        """Whether a run of this configuration ended with a loss or a gradient that is not finite."""
        summary = read_json(self.folder / "summary.json") or {}
        failed = summary.get("status") == "failed" and str(summary.get("reason")).startswith(
            FloatingPointError.__name__
        )
        return failed and self.config is not None and summary.get("identity") == folder.identity(self.config)

    def finished(self) -> bool:
        """Return whether its results are there, and those of all runs before it. A run with a broken checkpoint is not
        finished: started again, it names the remedy."""
        if self.after and not self.after.finished():
            return False
        if self.checkpoint:
            known = read_json(self.folder / "summary.json") or {}
            there = known.get("status") == "finished" and self.checkpoint.is_file()
            return there and self._measured().items() <= known.items()
        try:
            return self.config is not None and folder.finished(self.config)
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
    """One arm with one seed: a line of the table; or, with values that are tried, an attempt of tuning.

    Attributes:
        config: composed; all of its runs have it.
        overrides: that it was composed from.
        runs: by name; a single one without a name trains in the trial's own folder.
        values: that an attempt tries, by key. It is judged on a tuning split and lies where no table looks.
    """

    arm: str
    seed: int
    config: Mapping[str, Any] = field(repr=False)
    overrides: tuple[str, ...] = field(repr=False)
    runs: dict[str, Run] = field(default_factory=dict)
    values: Values | None = None

    @property
    def folder(self) -> Path:
        """With its summary."""
        return Path(self.config["folder"])

    @property
    def diverged(self) -> bool:
        """Whether it is an attempt with a run that has diverged, and would again."""
        return self.values is not None and any(run.diverged for run in self.runs.values())

    def finished(self) -> bool:
        """Return whether all of its runs have come to their end, or it has diverged."""
        return self.diverged or all(run.finished() for run in self.runs.values())

    def note(self, **facts: Any) -> None:
        """Write its state so far; a single run writes all by itself. Raises OSError."""
        if "" in self.runs:
            return
        known = {"experiment": self.config["name"], "arm": self.arm, "seed": self.seed, "reason": None, **facts}
        known[TRAINED] = self._trained()
        if read_json(self.folder / "summary.json") != known:
            write_json(self.folder / "summary.json", known)

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

    def cost(self, by: Mapping[str, str]) -> float:
        """Return the number that decides between attempts, lower is better; infinite if it has diverged.

        Raises ConfigError where its summary has no such number.
        """
        if self.diverged:
            return math.inf
        summary = RunSummary(self.arm, self.seed, self.folder, read_json(self.folder / "summary.json") or {})
        for column, way in by.items():
            value = summary.number(column)
            if value is not None:
                return math.inf if not math.isfinite(value) else -value if way == "highest" else value
        raise ConfigError(
            f"tune.by={' or '.join(by)} is not allowed because {self.folder}/summary.json has no such number. Use a "
            "number that it has"
        )

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


def expand(config: Mapping[str, Any], given: Sequence[str] = ()) -> list[Run]:
    """Return the runs of a configuration in the order in which they start, and write nothing.

    A run that several arms share stands once. With ``tune`` the attempts of a grid come first, and the runs after them
    have the first values of the grid; Optuna has not chosen its attempts yet.

    Args:
        config: composed (``gsm.config.compose.compose``).
        given: the overrides that it was composed from.

    Raises:
        ConfigError: an arm, a run or a value cannot be trained.
    """
    experiment = Experiment(config, given)
    return in_order([*experiment.grid(), *experiment.trials()])


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
        tune: the values that each arm tries first; None: nothing.
        choices: the best values of the arms for which the search has ended.

    Raises:
        ConfigError: arms, seeds, runs or table cannot be used.
    """

    def __init__(self, config: Mapping[str, Any], given: Sequence[str] = (), script: Sequence[str] = ()) -> None:
        keys = {key_of(line) for line in given}
        if "folder" in keys:
            raise ConfigError("folder= is one run's, but this experiment has several: choose logs= or name= instead")
        if {"seed", "seeds"} <= keys:
            raise ConfigError(
                f"seed={config['seed']} and seeds={config['seeds']} were both given: leave one of them out"
            )
        self.config, self.given, self.script = config, given, script
        self.arms = read_arms(config["arms"]) if config["arms"] is not None else {str(config["arm"]): []}
        self.chosen = read_chosen(config["arm"], self.arms) if "arm" in keys else list(self.arms)
        one_seed = config["seeds"] is None or "seed" in keys
        self.seeds = [config["seed"]] if one_seed else read_seeds(config["seeds"])
        self.columns = read_columns(config["table"])
        self.tune = read_tune(config.get("tune"), self.columns, config["runs"])
        self.choices: dict[str, Choice] = {}
        self._trials: dict[tuple[str, ...], Trial] = {}  # by overrides: composing takes a third of a second
        self._costs: dict[Trial, float] = {}  # of finished attempts
        self._tuners: dict[str, Grid | Study] = {}

    @property
    def folder(self) -> Path:
        """``logs/<name>``."""
        return Path(self.config["logs"]) / str(self.config["name"])

    @property
    def held(self) -> Path:
        """The folder that no other command may work on: the experiment's, or that of a single arm and seed."""
        single = self.config["arms"] is None and self.config["seeds"] is None and self.tune is None
        return self.trial(self.chosen[0], self.seeds[0]).folder if single else self.folder

    def trials(self) -> list[Trial]:
        """Return the chosen arms, seed by seed, so that arms can be compared early. Raises ConfigError, for any arm.

        An arm that is not tuned yet has the first values of its lists, and the lowest of its ranges.
        """
        for arm in self.chosen:
            self._check_tuning(arm)
        for arm in self.arms:
            self.trial(arm, self.seeds[0])
        return [self.trial(arm, seed) for seed in self.seeds for arm in self.chosen]

    def trial(self, arm: str, seed: int, values: Values | None = None) -> Trial:
        """Return one arm with one seed, or an attempt with values. Overrides of the user come last and hold for all.

        Raises ConfigError, which names the arm, and the run of it.
        """
        overrides = self._overrides(arm, seed, values)
        if overrides not in self._trials:
            with naming(f"arm {arm}" + (f" with {', '.join(lines(values))}" if values else "")):
                trial = Trial(arm, seed, self._composed(overrides), overrides, values=values)
                self._add_runs(trial)
            self._trials[overrides] = trial
        return self._trials[overrides]

    def table(self) -> Table:
        """Return the table of all finished runs of this configuration, of this command or another."""
        runs = [run for run in read_runs(self.folder) if run.finished and run.arm in self.arms and self.choice(run.arm)]
        mine = [run for run in runs if self.trial(run.arm, run.seed).finished()]
        tuned = {arm: choice.texts() for arm, choice in self.won.items()}
        return replace(summarise(mine, self.columns, self.arms), tuned=tuned)

    def contents(self) -> dict[str, Any]:
        """Return the folder's description: arms with their tuned values, and the table's columns."""
        values = {arm: lines(choice.values) for arm, choice in self.won.items()}
        arms = {arm: [*own, *values.get(arm, ())] for arm, own in self.arms.items()}
        tuned = {arm: {key: {"shown": text} for key, text in one.texts().items()} for arm, one in self.won.items()}
        return {"arms": arms, "table": self.columns, **({"tuned": tuned} if self.tune else {})}

    def space(self, arm: str) -> dict[str, Any]:
        """Return the values that an arm tries, without the keys that the arm or the command line sets."""
        fixed = {key_of(line) for line in [*self.arms[arm], *self.given]}
        space = self.tune.space if self.tune else {}
        return {key: values for key, values in space.items() if key.removeprefix("/") not in fixed}

    def grid(self) -> list[Trial]:
        """Return all attempts of the arms' grids, tried or not; none where Optuna chooses them. Raises ConfigError."""
        if self.tune is None or self.tune.tuner == OPTUNA:
            return []
        return [
            self.trial(arm, seed, values)
            for arm in self.chosen
            if (space := self.space(arm))
            for values in Grid(space).proposed
            for seed in self.tune.seeds
        ]

    def attempts(self, arm: str) -> list[Trial]:
        """Return the attempts that an arm has to train next. Without any, its best values are in ``choices``.

        Raises ConfigError.
        """
        space, tune = self.space(arm), self.tune
        if arm in self.choices or not tune or not space:
            self.choices.setdefault(arm, Choice({}, {}))
            return []

        def cost(values: Values) -> float | None:
            costs = [self._cost(self.trial(arm, seed, values)) for seed in tune.seeds]
            known = [one for one in costs if one is not None]
            return math.fsum(known) / len(known) if len(known) == len(costs) else None

        if arm not in self._tuners:  # made once: a study reads a file
            self._tuners[arm] = Grid(space) if tune.tuner != OPTUNA else self._study(arm, space)
        missing, choice = search(self._tuners[arm], cost)
        if choice:
            self.choices[arm] = choice
        tried = [self.trial(arm, seed, values) for values in missing for seed in tune.seeds]
        return [attempt for attempt in tried if self._cost(attempt) is None]

    def choice(self, arm: str) -> Choice | None:
        """Return the values that an arm is trained with; None: something is left to be tried."""
        self.attempts(arm)
        return self.choices.get(arm)

    @property
    def won(self) -> dict[str, Choice]:
        """The values of tuned arms, in the order of the arms; an arm with nothing but diverged attempts has none."""
        known = {arm: self.choices[arm] for arm in self.arms if arm in self.choices}
        return {arm: choice for arm, choice in known.items() if choice.values and choice.found}

    def _study(self, arm: str, space: Mapping[str, Any]) -> Study:
        assert self.tune is not None
        runs = self.trial(arm, self.tune.seeds[0], ends(space)[0]).runs.values()
        trains = " ".join(folder.identity({**run.config, "start_from": None}) for run in runs if run.config)
        return Study(self.tuning(arm) / JOURNAL, space, self.tune, trains)

    def tuning(self, arm: str) -> Path:
        """Return the folder of an arm's attempts."""
        return self.folder / TUNING / arm

    def _check_tuning(self, arm: str) -> None:
        """Raise ConfigError where an arm cannot be tuned: no tuning split, or a value that cannot be trained."""
        space, tune = self.space(arm), self.tune
        if not tune or not space:
            return
        first = self.trial(arm, self.seeds[0])
        with naming(f"arm {arm}"):
            _require_tunable(first.config)
        if tune.tuner != OPTUNA:
            self.choice(arm)  # composes every attempt
            return
        for values in ends(space):
            with naming(f"arm {arm} with {', '.join(lines(values))}"):
                instantiate(self.trial(arm, tune.seeds[0], values).config["optimizer"], "optimizer")

    def _cost(self, attempt: Trial) -> float | None:
        """Return None for an attempt that is not finished."""
        if attempt not in self._costs and self.tune and attempt.finished():
            if not attempt.diverged:
                attempt.conclude()  # a command that was killed has not written it
            self._costs[attempt] = attempt.cost(self.tune.by)
        return self._costs.get(attempt)

    def _overrides(self, arm: str, seed: int, values: Values | None) -> tuple[str, ...]:
        first = [line for line in self.given if key_of(line) in ("experiment", "runs")]  # which arms may change
        last = [line for line in self.given if line not in first and key_of(line).partition(".")[0] not in OWN]
        last = [line for line in last if line != "resume=never"]  # which the parent obeys, once
        tunes = self.tune or "tune" in map(key_of, self.given)  # the experiment's yaml would tune in every run
        one = ["arms=null", "seeds=null", *(["tune=null"] if tunes else [])]
        one += [f"arm={quoted(arm)}", f"seed={seed}", f"name={quoted(self.config['name'])}"]
        tuned = values
        if tuned is None:
            tuned = self.choices[arm].values if arm in self.choices else ends(self.space(arm))[0]
        if values is not None:
            place = self.tuning(arm) / label(values) / f"seed{seed}"
            last += ["data.held_out=tuning", "ngrams=false", "sample=false", f"folder={quoted(place)}"]
        return (*first, *one, *self.arms[arm], *lines(tuned), *last)

    def _add_runs(self, trial: Trial) -> None:
        """Add every run of a trial, or the run of another arm that trains the same."""
        config, entries = trial.config, trial.config["runs"]
        if entries is None:
            command, after = (*self.script, *trial.overrides), self._trained_in(config)
            trial.runs[""] = Run(self._name(trial.folder), trial.folder, command, after, config)
            return
        weights_of: dict[str | None, Path] = {}
        tries = trial.values is not None
        parsed = parse_runs(entries)
        for entry in _until(parsed, self.tune.until if self.tune else None) if tries else parsed:
            start, after = weights_of.get(entry.after), trial.runs.get(entry.after or "")
            if entry.checkpoint:
                weights_of[entry.name] = checkpoint_file(entry.checkpoint)
            elif entry.measures and start:
                trial.runs[entry.name] = self._evaluation(trial.folder / entry.name, entry, start, after)
            else:
                trial.runs[entry.name] = self._training(trial, entry, start, after)
                weights_of[entry.name] = checkpoint_file(trial.runs[entry.name].folder)

    def _training(self, trial: Trial, entry: Entry, start: Path | None, after: Run | None) -> Run:
        """Return a run that trains; arms with runs of one name that train the same share that of the first of them."""
        place = trial.folder / entry.name
        overrides = [*_without(trial.overrides, entry.lines, start), "runs=null", *entry.lines]
        overrides += [f"folder={quoted(place)}", *([f"start_from={quoted(start)}"] if start else [])]
        overrides += ["data.held_out=tuning"] if trial.values is not None else []  # whatever data the run chooses
        with naming(f"run {entry.name}"):
            config = self._composed(overrides)
        after, command = after or self._trained_in(config), (*self.script, *overrides)
        run = Run(self._name(place), place, command, after, config)
        for arm in self.arms if trial.values is None else ():
            if arm == trial.arm:
                break
            other = self.trial(arm, trial.seed).runs.get(entry.name)
            if other and other.config and other.after is after and _trains(other.config) == _trains(config):
                return other
        return run

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
        wanted, arms = checkpoint_file(config["start_from"]), [*self.arms]
        named = re.match(r"([^/]+)/seed(\d+)/", os.path.relpath(wanted, self.folder))
        if not named or named[1] not in arms[: arms.index(config["arm"])]:
            return None
        runs = self.trial(named[1], int(named[2])).runs.values()
        return next((run for run in runs if run.config and checkpoint_file(run.folder) == wanted), None)

    def _composed(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return a configuration that can be trained, and loaded from its checkpoint. Raises ConfigError."""
        config = compose(overrides)
        refuse_unnamed(config)
        if config.get("runs") is None:
            refuse_early(config)
        return config

    def _name(self, place: Path) -> str:
        return os.path.relpath(place, self.folder)


def _trains(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all that decides the weights of a run: its configuration, where it starts, and whether as a branch."""
    return folder.identity({**config, "start_from": None}), config.get("start_from"), weights.is_branch(config)


def _until(entries: Sequence[Entry], last: str | None) -> list[Entry]:
    """Return the entries that train; with ``last``, that entry and all entries before it in its chain."""
    wanted = {last}
    for entry in reversed(entries):
        wanted |= {entry.after} if entry.name in wanted else set()
    return [entry for entry in entries if not entry.measures and (last is None or entry.name in wanted)]


def _require_tunable(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for data without a tuning split, and for an arm that starts from one that is not there yet."""
    if "held_out" not in config["data"]:
        raise ConfigError(
            f"tune is not allowed because {config['data'].get('_target_')} has no data.held_out, so that no part of "
            "the training data decides. Use other data, or tune=null"
        )
    start = config.get("start_from")
    if start and not checkpoint_file(start).is_file():
        raise ConfigError(
            f"start_from={start} is not allowed because tuning finds no checkpoint there. Use arm=... to train it first"
        )


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Put the place of an error in front of it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _without(overrides: Sequence[str], lines: Sequence[str], start: Path | None) -> list[str]:
    """Return the overrides of a trial that hold for a run with these lines: not the keys that the run sets, nor those
    below a group that the run chooses itself."""
    groups = [key_of(line) for line in lines if is_group(key_of(line))]
    gone = tuple(f"{name}{mark}" for group in groups for name in (group, group.replace("/", ".")) for mark in "./")
    reset = {"runs", "folder", *(["start_from"] if start else [])}
    keys = {line: key_of(line) for line in overrides}
    return [
        line
        for line, key in keys.items()
        if not (key.partition(".")[0] in reset or key in groups or key.startswith(gone))
    ]
