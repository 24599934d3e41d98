"""Experiments: arms, seeds and runs that start after one another with one command, and a table in the end.

    python train.py experiment=paper_long_context

is the parent. It trains nothing itself: it composes and checks everything first, makes a job of every run
(``python train.py ... arm=gsm folder=logs/<name>/gsm/seed0/extend start_from=logs/<name>/gsm/seed0/train/...``) and of
every evaluation (``python evaluate.py checkpoint=...``), works off those that are not finished, and puts their numbers
together. So it can be stopped and given again at any time. An arm may consist of several runs:

    runs:
      train:                                                             # as the arm has it
      before: {after: train, evaluate: {}}                               # arguments of evaluate.py
      extend: {after: train, data.context: 65536, trainer.max_steps: 100}      # what differs
      tune: {after: extend, /data: ruler, data.answers: cot}             # a group has a slash, as in a defaults list

A run ``after`` another one starts from its last weights with a fresh optimiser. What several arms train alike is
trained once. ``runs.train=PATH`` stands for a checkpoint that is there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode

from gsm import paths
from gsm.config.check import ConfigError, flat, unknown
from gsm.config.command_line import again, read_arguments, search
from gsm.config.compose import compose, refuse_unnamed
from gsm.config.load import CheckpointError
from gsm.evaluation import commands, ruler
from gsm.evaluation.checkpoints import TRAINED
from gsm.evaluation.ruler import Ruler
from gsm.experiments import folder, launcher, report, trainers, weights
from gsm.experiments.compare import CONTENTS, apart, unfinished, write
from gsm.experiments.fit import train
from gsm.experiments.jobs import Child, Job, tail, work_off
from gsm.experiments.table import COLUMNS, FOOTNOTE, WIDTH, RunSummary, Table, read_runs, shown, summarise
from gsm.files import read_json, write_json
from gsm.training.callbacks.progress import clock

SEVERAL = ("arms", "seeds", "runs")  # one of them makes an experiment of a configuration
OWN = {"arm", "arms", "seed", "seeds", "jobs", "force", "table"}  # the parent's keys; a job gets its own
NOT_FOR_ARMS = {*OWN, "name", "logs", "folder", "experiment", "resume"}
NOT_FOR_RUNS = {*NOT_FOR_ARMS, "runs", "start_from"}
AFTER, EVALUATE = "after", "evaluate"  # of a run's keys, those that are no overrides
TOLD = ("checkpoint", "output")  # of evaluate.py's arguments, those that its job says
NAME = re.compile(r"[A-Za-z_][\w.+-]*")
LAST = folder.LAST
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")  # what Hydra's grammar takes for one word
WORDS = {"null", "true", "false", "nan", "inf"}  # what it takes for values rather than names


@dataclass(frozen=True, eq=False)
class Training(Job):
    """Trains with this configuration."""

    config: Mapping[str, Any] = field(kw_only=True, repr=False)

    @property
    def folder(self) -> Path:
        """Where it trains."""
        return Path(self.config["folder"])

    def finished(self) -> bool:
        """Whether it has come to its end. One whose checkpoint is broken has not: the run itself then says what can be
        done."""
        try:
            return folder.finished(self.config)
        except (CheckpointError, FileNotFoundError) as error:  # its own, or the one that it started from
            print(f"{self.name} was finished, but cannot be used: {error}", flush=True)
            return False


@dataclass(frozen=True, eq=False)
class Evaluation(Job):
    """Measures a checkpoint with these arguments of evaluate.py."""

    folder: Path = field(kw_only=True)
    checkpoint: Path = field(kw_only=True)
    words: tuple[str, ...] = field(kw_only=True)

    def finished(self) -> bool:
        """Whether just this was measured of just these weights."""
        known = read_json(self.folder / "summary.json") or {}
        there = known.get("status") == "finished" and self.checkpoint.is_file()
        return there and self._measured().items() <= known.items()

    def conclude(self) -> None:
        """Writes what was measured, and what came out of it."""
        chosen, _ = commands.choose(self.words)
        found = {"status": "finished", **self._measured(), "metrics": chosen.metrics_in(self.folder)}
        write_json(self.folder / "summary.json", found)

    def _measured(self) -> dict[str, Any]:
        return {"command": list(self.words), "checkpoint": weights.digest(self.checkpoint)}


@dataclass(frozen=True)
class Run:
    """An entry of ``runs``: the overrides that it trains with, the arguments that it measures with, or a checkpoint."""

    name: str
    after: str | None = None
    lines: tuple[str, ...] = ()
    measures: bool = False
    given: str | None = None


@dataclass(frozen=True)
class Trial:
    """One arm with one seed: what a line of the table is made from.

    Attributes:
        config: composed; what all of its runs have.
        overrides: that it was composed from.
        jobs: by the name of the run; a single one without a name trains in the trial's own folder.
    """

    arm: str
    seed: int
    config: Mapping[str, Any] = field(repr=False)
    overrides: tuple[str, ...] = field(repr=False)
    jobs: dict[str, Training | Evaluation] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its summary lies."""
        return Path(self.config["folder"])

    def finished(self) -> bool:
        """Whether all that it consists of has come to its end."""
        return all((job.after is None or job.after.finished()) and job.finished() for job in self.jobs.values())

    def note(self, **facts: Any) -> None:
        """Writes what is known of it so far; a single job writes all by itself. Raises OSError."""
        if "" in self.jobs:
            return
        known = {"experiment": self.config["name"], "arm": self.arm, "seed": self.seed, "reason": None, **facts}
        known[TRAINED] = self._trained()
        if read_json(self.folder / "summary.json") != known:
            write_json(self.folder / "summary.json", known)

    def conclude(self) -> None:
        """Writes all that its last training says, and the metrics of every evaluation. Raises OSError."""
        if "" in self.jobs:
            return
        said = {name: read_json(job.folder / "summary.json") or {} for name, job in self.jobs.items()}
        where = {name: os.path.relpath(job.folder, self.folder) for name, job in self.jobs.items()}
        facts = said[self._trained()[-1]] if self._trained() else {}
        facts |= {f"{name}/{key}": x for name, one in said.items() for key, x in one.get("metrics", {}).items()}
        runs = {name: {**said[name], "folder": where[name]} for name in self.jobs}
        curves = where[self._trained()[0]] if self._trained() else ""
        self.note(**{**facts, "status": "finished", "runs": runs, "curves": curves, "run": None})

    def _trained(self) -> list[str]:
        return [name for name, job in self.jobs.items() if isinstance(job, Training)]


class Experiment:
    """What one command asks for.

    Args:
        config: the parent's composed configuration.
        given: the overrides on the parent's command line, without Hydra's own.
        script: the command that trains one run, as words; overrides are added to it.

    Attributes:
        arms: all arms by name, with their overrides.
        chosen: the names of those to train.
        seeds: to train them with.

    Raises:
        ConfigError: arms, seeds, jobs or table cannot be used.
    """

    def __init__(self, config: Mapping[str, Any], given: Sequence[str] = (), script: Sequence[str] = ()) -> None:
        keys = {_key(line) for line in given}
        if "folder" in keys:
            raise ConfigError("folder= is one run's, but this experiment has several: choose logs= or name= instead")
        if config["jobs"] < 1:
            raise ConfigError(f"jobs is {config['jobs']}, but has to be 1 or more: how many runs train at a time")
        self.config, self.given, self.script = config, given, script
        self.arms = read_arms(config["arms"]) if config["arms"] is not None else {str(config["arm"]): []}
        self.chosen = _read_chosen(config["arm"], self.arms) if "arm" in keys else list(self.arms)
        if {"seed", "seeds"} <= keys:
            raise ConfigError(
                f"seed={config['seed']} and seeds={config['seeds']} were both given: leave one of them out"
            )
        one_seed = config["seeds"] is None or "seed" in keys
        self.seeds = [config["seed"]] if one_seed else _read_seeds(config["seeds"])
        self.columns = _read_columns(config["table"])
        self._trials: dict[tuple[str, int], Trial] = {}  # to compose one takes a third of a second
        self._alike: dict[tuple[str, str], Training] = {}

    @property
    def folder(self) -> Path:
        """``logs/<name>``."""
        return Path(self.config["logs"]) / str(self.config["name"])

    @property
    def held(self) -> Path:
        """The folder that no other command may work on: the experiment's, or that of a single arm and seed."""
        single = self.config["arms"] is None and self.config["seeds"] is None
        return self.trial(self.chosen[0], self.seeds[0]).folder if single else self.folder

    def trials(self) -> list[Trial]:
        """What is to be trained, seed by seed, so that arms can be compared early. Raises ConfigError, for any arm."""
        found = [self.trial(arm, seed) for seed in self.seeds for arm in self.chosen]
        for arm in self.arms:
            self.trial(arm, self.seeds[0])
        return found

    def trial(self, arm: str, seed: int) -> Trial:
        """One arm with one seed; what the user has given comes last and so holds for every arm.

        Raises ConfigError, which names the arm, and the run of it.
        """
        if (arm, seed) not in self._trials:
            overrides = self._overrides(arm, seed)
            try:
                config = compose(overrides)
                refuse_unnamed(config)
                if config.get("runs") is None:
                    trainers.refuse_remainder(config)
                trial = Trial(arm, seed, config, overrides)
                self._add_jobs(trial)
            except ConfigError as error:
                raise ConfigError(f"arm {arm}: {error}") from error
            self._trials[arm, seed] = trial
        return self._trials[arm, seed]

    def table(self) -> Table:
        """Of all finished runs of this configuration, whether this command has trained them or another."""
        runs = [run for run in read_runs(self.folder) if run.finished and run.arm in self.arms]
        return summarise([run for run in runs if self.trial(run.arm, run.seed).finished()], self.columns, self.arms)

    def _overrides(self, arm: str, seed: int) -> tuple[str, ...]:
        mine = [line for line in self.given if _key(line) in ("experiment", "runs")]  # which arms may change
        theirs = [line for line in self.given if line not in mine and _key(line).partition(".")[0] not in OWN]
        theirs = [line for line in theirs if line != "resume=never"]  # which the parent obeys, once
        return (*mine, "arms=null", "seeds=null", f"arm={arm}", f"seed={seed}", *self.arms[arm], *theirs)

    def _add_jobs(self, trial: Trial) -> None:
        """One for every run of a trial, or that of another arm which trains the same."""
        config, asked = trial.config, trial.config["runs"]
        if asked is None:
            name, after = self._name(trial.folder), self._trained_in(config.get("start_from"))
            command, log = (*self.script, *trial.overrides), trial.folder / "train.log"
            trial.jobs[""] = Training(name, command, log, after, config=config)
            return
        if str(config["resume"]) not in ("auto", "never"):
            raise ConfigError("resume=PATH is for a single run: runs.<name>=PATH takes the weights of a checkpoint")
        weights_of: dict[str | None, Path] = {}
        for run in parse_runs(asked):
            start, after = weights_of.get(run.after), trial.jobs.get(run.after or "")
            if run.given:
                weights_of[run.name] = _checkpoint(run.given)
            elif run.measures and start:
                trial.jobs[run.name] = self._evaluation(trial.folder / run.name, run, start, after)
            else:
                trial.jobs[run.name] = self._training(trial, run, start, after)
                weights_of[run.name] = _checkpoint(trial.jobs[run.name].folder)

    def _training(self, trial: Trial, run: Run, start: Path | None, after: Job | None) -> Training:
        """Where it is finished already, in this arm or another, or what is to be done for all arms that train alike."""
        own = trial.folder / run.name
        overrides = [*_without(trial.overrides, run.lines, start), "runs=null", *run.lines, f"folder={_quoted(own)}"]
        overrides += [f"start_from={_quoted(start)}"] if start else []
        try:
            config = compose(overrides)
            refuse_unnamed(config)
            trainers.refuse_remainder(config)
        except ConfigError as error:
            raise ConfigError(f"run {run.name}: {error}") from error
        after = after or self._trained_in(config.get("start_from"))
        job = Training(self._name(own), (*self.script, *overrides), own / "train.log", after, config=config)
        if after is None or after.finished():
            for place in [own, *sorted(self.folder.glob(f"*/seed{trial.seed}/{run.name}"))]:
                there = replace(job, name=self._name(place), config={**config, "folder": str(place)})
                if there.finished():
                    return there
        begins = after.name if after else str(weights.digest(config.get("start_from")))
        return self._alike.setdefault((folder.identity({**config, "start_from": None}), begins), job)

    def _evaluation(self, place: Path, run: Run, start: Path, after: Job | None) -> Evaluation:
        chosen, _ = commands.choose(run.lines)
        prefix, output = "ruler." if chosen is Ruler else "", place if chosen.takes_folder else place / chosen.file
        words = [*run.lines, f"checkpoint={start}", f"{prefix}output={output}"]
        command, log = (sys.executable, str(paths.ROOT / "evaluate.py"), *words), place / "evaluate.log"
        return Evaluation(self._name(place), command, log, after, folder=place, checkpoint=start, words=run.lines)

    def _trained_in(self, start: str | None) -> Job | None:
        """The job, of an arm before, that trains what another one starts from."""
        jobs = (job for trial in self._trials.values() for job in trial.jobs.values() if isinstance(job, Training))
        return next((job for job in jobs if start and _checkpoint(job.folder) == _checkpoint(start)), None)

    def _name(self, place: Path) -> str:
        return os.path.relpath(place, self.folder)


def run(config: Mapping[str, Any]) -> None:
    """What ``train.py`` does inside of Hydra: one run, or, where the configuration has several, all of those."""
    job = HydraConfig.get()
    if all(config[name] is None for name in SEVERAL):
        if launcher.chosen() and job.mode != RunMode.MULTIRUN:
            raise ConfigError(f"{launcher.GROUP}={launcher.chosen()} is for experiments; for a single run: seeds=1")
        train(config)
    elif job.mode == RunMode.MULTIRUN:
        raise ConfigError("an experiment with arms or seeds starts its runs itself: leave out -m (--multirun)")
    else:
        train_all(Experiment(config, list(job.overrides.task), _script()), launcher.chosen())


def train_all(experiment: Experiment, hand_to: str | None = None) -> Table:
    """Does what is not finished yet, and prints and writes the table.

    Args:
        experiment: what to train.
        hand_to: the launcher of Hydra's that trains; None: processes of this machine.

    Raises:
        ConfigError: an arm or a run is wrong, or another process works on this experiment.
        SystemExit: 1 if a run has failed, 128 + the number of a signal that has stopped it.
    """
    _refuse_ranks()
    trials = experiment.trials()
    with folder.locked(experiment.held):
        config = experiment.config
        write_json(experiment.folder / CONTENTS, {"arms": experiment.arms, "table": experiment.columns})
        if config["force"] or config["resume"] == "never":
            anew = [trial for trial in trials if config["force"] or not trial.finished()]
            _set_aside(anew, experiment.held)
            experiment = Experiment(config, experiment.given, experiment.script)  # as of what is finished now
            trials = experiment.trials()
        work = _Work(experiment, trials)
        print(work.header(), flush=True)
        stopped = work.hand_over(hand_to) if hand_to and work.waiting else work.train()
        if stopped is not None:
            print(f"\nstopped; to go on:\n  {again()}", flush=True)
            raise SystemExit(128 + stopped)
        table = experiment.table()
        print(_conclusion(experiment, table), flush=True)
    if work.failed:
        print(work.complaints(), flush=True)
        raise SystemExit(1)
    return table


class _Work:
    """Has the jobs of trials worked off, keeps their summaries, and tells how each job ends."""

    def __init__(self, experiment: Experiment, trials: Sequence[Trial]) -> None:
        self.experiment, self.trials = experiment, trials
        self.done: dict[Job, None] = {}  # in their order
        self.waiting: list[Job] = []
        for job in dict.fromkeys(job for trial in trials for job in trial.jobs.values()):
            is_done = job.after not in self.waiting and job.finished()
            self.done |= {job: None} if is_done else {}
            self.waiting += [] if is_done else [job]
        self.at_once = min(experiment.config["jobs"], len(self.waiting))
        self.failed: dict[str, list[str]] = {}  # what is said of each, by name
        for trial in trials:
            self._conclude(trial)  # which a command that was killed has not

    def train(self) -> int | None:
        """With processes of this machine; returns the signal that has ended it all, if one has."""
        stopped = work_off(self.waiting, self.at_once, self._start, self._ended)
        for job in self.waiting if stopped is not None else []:
            if job.name in self.failed:
                self._note(job, "interrupted", "was stopped")
        return stopped

    def hand_over(self, hand_to: str) -> None:
        """With a launcher of Hydra's: all of them at once, and it is heard of them when all have ended."""
        parts = _parts(self.trials, self.waiting)
        print(f"{len(parts)} runs go to {hand_to}; what each says: <arm>/seed<k>/train.log", flush=True)
        for job in self.waiting:
            self._note(job, "running")
        try:
            codes = launcher.launch(parts)
        except launcher.GaveUp as error:
            print(error, flush=True)
            codes = {job.name: 0 for job in self.waiting if job.finished()}
        for job in self.waiting:
            self._ended(job, codes.get(job.name))

    def header(self) -> str:
        """What is about to be done, and what is not."""
        experiment = self.experiment
        lines = [
            f"experiment {experiment.config['name']}: arms {', '.join(experiment.chosen)}; "
            f"seeds {', '.join(map(str, experiment.seeds))}; in {report.shown(experiment.folder)}"
        ]
        if self.done:
            names = ", ".join(job.name for job in self.done)
            lines.append(f"finished already, and skipped (force=true runs them again): {names}")
        for line in _without_effect(self.trials[0]):
            lines.append(f"{line} changes nothing, as every run sets that: ++runs.<name>.{line} would")
        return "\n".join(part for line in lines for part in textwrap.wrap(line, WIDTH, break_on_hyphens=False))

    def complaints(self) -> str:
        """Which jobs have failed, with their last words."""
        lines = [line for said in self.failed.values() for line in ["", *said]]
        return "\n".join([*lines, "", f"failed: {', '.join(self.failed)}; to try again:\n  {again()}"])

    def _start(self, job: Job) -> Child:
        print(f"{self._label(job)}: started, output in {report.shown(job.log)}", flush=True)
        if self.at_once > 1:
            print(textwrap.indent(shlex.join(job.command), "    "), flush=True)
        self._note(job, "running")
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        threads = {"OMP_NUM_THREADS": str(max(1, cores // self.at_once))}  # one alone takes what it finds
        return Child(job, threads if self.at_once > 1 else {}, follow=self.at_once == 1)

    def _ended(self, job: Job, code: int | None, child: Child | None = None) -> None:
        """Prints how a job has ended, notes it, and remembers one that has failed."""
        how, numbers = _how(code), ""
        if code == 0:
            self.done[job] = None
            numbers = "".join(self._conclude(trial) for trial in self.trials if job in trial.jobs.values())
        elif job.after and job.after.name in self.failed:
            how = f"not started, as {job.after.name} has failed"
            self.failed[job.name] = [f"{job.name}: {how}"]
        else:
            words = child.tail() if child else tail(job.log)
            said = f"the end of {report.shown(job.log)}:" if words else "it has written no log"
            self.failed[job.name] = [f"{job.name} failed; {said}", *(f"  {word}" for word in words)]
            self._note(job, "failed", how)
        print(f"{self._label(job)}: {how}{f' after {clock(child.seconds())}' if child else ''}{numbers}", flush=True)

    def _label(self, job: Job) -> str:
        return f"[{self.waiting.index(job) + 1}/{len(self.waiting)}] {job.name}"

    def _note(self, job: Job, status: str, reason: str = "") -> None:
        for trial in self.trials:
            for name in [name for name, its in trial.jobs.items() if its is job]:
                trial.note(status=status, run=name, reason=f"run {name} {reason}" if reason else None)

    def _conclude(self, trial: Trial) -> str:
        """Writes the summary of a trial all of whose jobs are done; its columns of the table, as words."""
        if not self.done.keys() >= {*trial.jobs.values()}:
            return ""
        trial.conclude()
        found = RunSummary(trial.arm, trial.seed, trial.folder, read_json(trial.folder / "summary.json") or {})
        return "".join(f", {column} {shown(found.value(column))}" for column in self.experiment.columns)


def _how(code: int | None) -> str:
    """A job's end in words."""
    if code is None:
        return "has not come to its end"
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}" if code else "finished"


def _parts(trials: Sequence[Trial], waiting: Sequence[Job]) -> dict[tuple[str, ...], list[Job]]:
    """What a cluster can work off each for itself, by the overrides of the first trial in it: a trial, or those that
    wait for one another."""
    parts: dict[tuple[str, ...], list[Job]] = {}
    for trial in trials:
        mine = [job for job in waiting if job in trial.jobs.values()]
        met = [key for key, part in parts.items() if {*mine, *(job.after for job in mine)} & {*part}]
        jobs = [job for key in met for job in parts.pop(key)] + mine
        if mine:
            parts[met[0] if met else trial.overrides] = list(dict.fromkeys(jobs))
    return parts


def _script() -> list[str]:
    """What trains one run: this script, with the flag that says where yaml files are, and Hydra's own overrides."""
    parsed, _ = get_args_parser().parse_known_args(sys.argv[1:])
    for flag, value in (("--config-name", parsed.config_name), ("--config-path", parsed.config_path)):
        if value:
            raise ConfigError(
                f"{flag} {value} was given, but an experiment composes its runs from configs/train.yaml: leave it out, "
                "and add yaml files of your own with --config-dir"
            )
    noted = search(paths.config_folders()[1:])  # by this script, as each that it starts does
    own = [line for line in HydraConfig.get().overrides.hydra if line != noted]
    if any(line.startswith("hydra.searchpath=") for line in own):
        raise ConfigError("hydra.searchpath= was given: add yaml files of your own with --config-dir instead")
    own_yamls = ["--config-dir", parsed.config_dir] if parsed.config_dir else []
    ours = ("hydra.run.", "hydra.mode=", f"{launcher.GROUP}=", "hydra.launcher.")
    return [sys.executable, sys.argv[0], *own_yamls, *(line for line in own if not line.startswith(ours))]


def _refuse_ranks() -> None:
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "WORLD_SIZE is set, so this is one of several ranks, but an experiment is one process that starts others: "
            "leave out torchrun and set trainer.devices, or train one arm with arms=null seeds=null runs=null"
        )


def _set_aside(trials: Sequence[Trial], held: Path) -> None:
    """Moves earlier runs away at once, so that what is interrupted can go on without being forced again."""
    for trial in trials:
        with contextlib.nullcontext() if trial.folder == held else folder.locked(trial.folder):
            folder.prepare({**trial.config, "resume": "never"})


def _conclusion(experiment: Experiment, table: Table) -> str:
    mine = {run.folder for run in table.runs}
    others = [run for run in read_runs(experiment.folder) if run.finished and run.folder not in mine]
    names = ", ".join(f"{run.arm}/seed{run.seed}" for run in others)
    notes = [*apart(table.runs), *([f"left out, being of another configuration: {names}"] if names else [])]
    notes += unfinished([experiment.folder])
    written = write(table, experiment.folder, "results", notes)
    lines = ["", table.text(), ""]
    for sentence in [FOOTNOTE, *notes, *written]:
        lines += textwrap.wrap(sentence, WIDTH, break_on_hyphens=False)
    asked = ruler.known_below([run.folder for run in table.runs])
    lines += ["", ruler.side_by_side_of(asked, experiment.folder / Ruler.file)] if asked else []
    for column in table.empty_columns():
        known = ", ".join(key for key, value in table.runs[0].summary.items() if isinstance(value, int | float))
        lines += textwrap.wrap(f"no run has a number '{column}' in its summary.json; there are {known}", WIDTH)
    return "\n".join(lines)


# What a configuration says of arms, seeds, runs and columns, read and checked.


def read_arms(arms: Any) -> dict[str, list[str]]:
    """The arms of a configuration; without those that are null, which an experiment does not take over from the one
    that it builds on. Raises ConfigError."""
    if not isinstance(arms, Mapping) or not arms:
        raise ConfigError(
            f"arms is {arms!r}, but maps names to overrides, for example {{plain: [model/residual=plain]}}"
        )
    arms = {name: overrides for name, overrides in arms.items() if overrides is not None}
    for name, overrides in arms.items():
        _check_name("arms", str(name))
        if not isinstance(overrides, list) or not all(isinstance(line, str) for line in overrides):
            raise ConfigError(f"arms.{name} is {overrides!r}, but takes a list of overrides such as [model=baseline]")
        _check_overrides(f"arms.{name}", overrides, NOT_FOR_ARMS, "the experiment's")
    return {str(name): list(overrides) for name, overrides in arms.items()}


def parse_runs(runs: Any) -> list[Run]:
    """The runs of a configuration, in its order. Raises ConfigError."""
    if not isinstance(runs, Mapping) or not runs:
        raise ConfigError(
            f"runs is {runs!r}, but maps names to what differs, for example "
            "{train: null, extend: {after: train, data.context: 1024}}"
        )
    found: dict[str, Run] = {}
    for name, asked in runs.items():
        run = _parse_run(str(name), asked)
        before = found.get(run.after) if run.after is not None else None
        if run.after is not None and before is None:
            raise ConfigError(
                f"runs.{name} is after {run.after}, but no run of that name stands before it ({', '.join(found)}); "
                f"runs.{run.after}=PATH takes the weights of a checkpoint"
            )
        if before and before.measures:
            raise ConfigError(f"runs.{name} is after {run.after}, which measures, and so leaves no weights")
        if run.measures and run.after is None:
            raise ConfigError(f"runs.{name} measures, but does not say what: give it after: <run>")
        found[run.name] = run
    if all(run.given for run in found.values()):
        raise ConfigError(f"runs has {', '.join(found)} alone, which are there already: one has to train or to measure")
    return list(found.values())


def _parse_run(name: str, asked: Any) -> Run:
    _check_name("runs", name)
    if isinstance(asked, str):
        return Run(name, given=asked)
    if not isinstance(asked, Mapping | None):
        raise ConfigError(f"runs.{name} is {asked!r}, but maps keys to values, or is the path of a checkpoint")
    entries = dict(asked or {})
    after = entries.pop(AFTER, None)
    after = after if after is None else str(after)
    if EVALUATE not in entries:
        lines = [_line(name, key, value) for key, value in _flat(f"runs.{name}", entries).items()]
        _check_overrides(f"runs.{name}", lines, NOT_FOR_RUNS, "the experiment's")
        return Run(name, after, tuple(lines))
    if len(entries) > 1:
        raise ConfigError(f"runs.{name} has evaluate beside other keys: let one run train, and another evaluate it")
    wanted = entries[EVALUATE] or {}
    if not isinstance(wanted, Mapping):
        raise ConfigError(f"runs.{name}.evaluate is {wanted!r}, but maps arguments of evaluate.py to values")
    lines = commands.words(_flat(f"runs.{name}.evaluate", wanted))
    chosen, words = commands.choose(lines)
    for word in words:
        if word.partition("=")[0] in TOLD:
            raise ConfigError(f"runs.{name}.evaluate has {word}, which is the experiment's to say: leave it out")
    try:  # what evaluate.py would not take is refused now, not when everything is trained
        chosen(**read_arguments(words, chosen, chosen.script))
    except ConfigError as error:
        raise ConfigError(f"runs.{name}.evaluate: {error}") from error
    return Run(name, after, tuple(lines), measures=True)


def _flat(where: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Every value under the path to it, in the order of the yaml.

    Where `a.b: 1` and `a: {b: 2}` are both there, the second counts: it is what ++runs.<name>.a.b=2 makes of it.
    """
    empty = [key for key, value in asked.items() if isinstance(value, Mapping) and not flat(value)]
    if empty:
        raise ConfigError(f"{where} has {empty[0]} without a value: give it one, or leave it out")
    return flat(asked) | flat({key: value for key, value in asked.items() if "." not in key})


def _line(run: str, name: str, value: Any) -> str:
    """An entry of a run as an override; a group has a slash in front, so that values below it can be given too."""
    if isinstance(value, str) and _is_group(name):
        raise ConfigError(f"runs.{run}.{name} is '{value}', but {name} is a group: write /{name}: {value}")
    return f"{name.removeprefix('/')}={_quoted(value)}"


def _is_group(name: str) -> bool:
    return any((place / name).is_dir() for place in paths.config_folders())


def _without(overrides: Sequence[str], lines: Sequence[str], start: Path | None) -> list[str]:
    """The overrides of a trial that hold for a run with these lines: not what is said anew, nor what is said of a group
    that the run chooses itself."""
    groups = [_key(line) for line in lines if _is_group(_key(line))]
    gone = tuple(f"{name}{mark}" for group in groups for name in (group, group.replace("/", ".")) for mark in "./")
    said = {"runs", *(["start_from"] if start else [])}
    keys = {line: _key(line) for line in overrides}
    return [
        line
        for line, key in keys.items()
        if not (key.partition(".")[0] in said or key in groups or key.startswith(gone))
    ]


def _without_effect(trial: Trial) -> list[str]:
    """Overrides of all runs that every one which trains says otherwise."""
    runs = parse_runs(trial.config["runs"]) if trial.config["runs"] else []
    said = [{_key(line) for line in run.lines} for run in runs if not (run.measures or run.given)]
    return [line for line in trial.overrides if said and _key(line) in set.intersection(*said)]


def _read_chosen(wanted: Any, arms: Mapping[str, list[str]]) -> list[str]:
    """The arms that ``arm=`` picks. Raises ConfigError for one that there is not."""
    names = [str(name) for name in (wanted if isinstance(wanted, list) else [wanted])]
    for name in names:
        if name not in arms:
            raise unknown("arm", name, arms, "the experiment")
    return list(dict.fromkeys(names))


def _read_seeds(seeds: Any) -> list[int]:
    """``[0, 2]``, or 3 for the first three. Raises ConfigError."""
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(seeds))
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int or seed < 0 for seed in seeds):
        raise ConfigError(f"seeds is {seeds!r}, but takes a list such as [0,1,2], or how many: seeds=3")
    return list(dict.fromkeys(seeds))


def _read_columns(table: Any) -> list[str]:
    """The keys that the table shows. Raises ConfigError."""
    if table is None:
        return list(COLUMNS)
    if not isinstance(table, list) or not table or not all(isinstance(column, str) for column in table):
        raise ConfigError(f"table is {table!r}, but takes a list of keys of summary.json such as [bits_per_byte]")
    return table


def _check_name(where: str, name: str) -> None:
    if not NAME.fullmatch(name) or name in WORDS:
        raise ConfigError(
            f"{where} has the name '{name}', but a name begins with a letter and has no spaces or slashes"
        )


def _check_overrides(where: str, lines: Iterable[str], reserved: Set[str], owner: str) -> None:
    """Raises ConfigError, which names ``where``, for an override that cannot be read or sets what is its owner's."""
    for line in lines:
        try:
            sets = _key(line)
        except HydraException as error:
            raise ConfigError(f"{where}: cannot read '{line}': write key=value or group=option") from error
        if sets in reserved:
            raise ConfigError(f"{where} sets {sets}, which is {owner}: leave {line} out")


def _key(line: str) -> str:
    """The key or group that an override sets. Raises HydraException."""
    return OverridesParser.create().parse_override(line).key_or_group


def _checkpoint(place: str | Path) -> Path:
    """The last checkpoint of a run's folder; a file is one itself."""
    return Path(place) if Path(place).suffix == ".ckpt" else Path(place) / LAST


def _quoted(value: Any) -> str:
    """A value as an override on the command line has it."""
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    plain = not isinstance(value, str | Path) or (PLAIN.fullmatch(text) and text not in WORDS)
    return text if plain else QuotedString(text=text, quote=Quote.single).with_quotes()
