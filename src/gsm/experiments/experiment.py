"""Experiments: several arms and seeds with one command, each in a process of its own, and a table in the end.

``python train.py experiment=ablate_residual`` is the parent. It trains nothing itself: it composes and checks every run
first, starts ``python train.py experiment=ablate_residual arms=null seeds=null arm=mhc seed=0 ...`` for those that are
not finished yet, and puts their summaries together. So it can be stopped and given again at any time.
"""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from gsm.config.check import ConfigError
from gsm.config.command_line import again
from gsm.config.compose import compose, job_directories
from gsm.config.load import CheckpointError
from gsm.evaluation.commands import ruler
from gsm.experiments import launcher, phases, report, trainers
from gsm.experiments.arms import OWN, key, read_arms, read_chosen, read_columns, read_seeds
from gsm.experiments.children import Child, tail, work_off
from gsm.experiments.compare import CONTENTS, apart, unfinished, write
from gsm.experiments.fit import train
from gsm.experiments.folder import finished, locked, prepare
from gsm.experiments.table import FOOTNOTE, WIDTH, RunSummary, Table, read_runs, shown, summarise
from gsm.files import write_json
from gsm.training.callbacks.progress import clock

LOG = "train.log"
Failure = tuple[Path, list[str]]  # what a run that has failed has written, and its last words


@dataclass(frozen=True)
class Job:
    """One run to train: its place in the experiment, its command line, and the configuration composed from that."""

    arm: str
    seed: int
    overrides: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)

    @property
    def folder(self) -> Path:
        """Where it trains."""
        return Path(self.config["folder"])

    @property
    def name(self) -> str:
        """Its folder, as seen from the experiment's."""
        return f"{self.arm}/seed{self.seed}"


class Experiment:
    """What one command asks for.

    Args:
        config: the parent's composed configuration.
        given: the overrides on the parent's command line, without Hydra's own.
        directories: folders of yaml files besides ``configs/``.

    Attributes:
        arms: all arms by name, with their overrides.
        chosen: the names of those to train.
        seeds: to train them with.

    Raises:
        ConfigError: arms, seeds, jobs or table cannot be used.
    """

    def __init__(self, config: Mapping[str, Any], given: Sequence[str] = (), directories: Sequence[Path] = ()) -> None:
        keys = {key(line) for line in given}
        if "folder" in keys:
            raise ConfigError("folder= is one run's, but this experiment has several: choose logs= or name= instead")
        if config["jobs"] < 1:
            raise ConfigError(f"jobs is {config['jobs']}, but has to be 1 or more: how many runs train at a time")
        self.config, self.given, self.directories = config, given, directories
        self.arms = read_arms(config["arms"]) if config["arms"] is not None else {str(config["arm"]): []}
        self.chosen = read_chosen(config["arm"], self.arms) if "arm" in keys else list(self.arms)
        if {"seed", "seeds"} <= keys:
            raise ConfigError(
                f"seed={config['seed']} and seeds={config['seeds']} were both given: leave one of them out"
            )
        one_seed = config["seeds"] is None or "seed" in keys
        self.seeds = [config["seed"]] if one_seed else read_seeds(config["seeds"])
        self.columns = read_columns(config["table"])
        self._jobs: dict[tuple[str, int], Job] = {}  # to compose one takes a third of a second
        self._phased: dict[tuple[str, int], phases.Phased] = {}

    @property
    def folder(self) -> Path:
        """``logs/<name>``."""
        return Path(self.config["logs"]) / str(self.config["name"])

    def jobs(self) -> list[Job]:
        """What is to be trained, seed by seed, so that arms can be compared early. Raises ConfigError, for any arm."""
        for arm in self.arms:
            self.phased(self.job(arm, self.seeds[0]))
        return [self.job(arm, seed) for seed in self.seeds for arm in self.chosen]

    def job(self, arm: str, seed: int) -> Job:
        """One run; what the user has given comes last and so holds for every arm. Raises ConfigError, with the arm."""
        if (arm, seed) not in self._jobs:
            overrides = self._overrides(arm, seed)
            try:
                config = compose(overrides, self.directories)
                if config.get("phases") is None:
                    trainers.refuse_remainder(config)
                self._jobs[arm, seed] = Job(arm, seed, overrides, config)
            except ConfigError as error:
                raise ConfigError(f"arm {arm}: {error}") from error
        return self._jobs[arm, seed]

    def phased(self, job: Job) -> phases.Phased | None:
        """The phases of a run; None: it trains in one go. Raises ConfigError, with the arm."""
        if job.config.get("phases") is None:
            return None
        if (job.arm, job.seed) not in self._phased:
            try:
                self._phased[job.arm, job.seed] = phases.Phased(job.config, job.overrides, self.directories)
            except ConfigError as error:
                raise ConfigError(f"arm {job.arm}: {error}") from error
        return self._phased[job.arm, job.seed]

    def finished(self, job: Job) -> bool:
        """Whether a run has come to its end. One whose checkpoint is broken has not, and says so: the run itself then
        tells what can be done."""
        try:
            phased = self.phased(job)
            return phased.finished() if phased else finished(job.config)
        except CheckpointError as error:
            print(f"{job.name} was finished, but cannot be used: {error}", flush=True)
            return False

    def _overrides(self, arm: str, seed: int) -> tuple[str, ...]:
        mine = [line for line in self.given if key(line) == "experiment"]
        theirs = [line for line in self.given if key(line).partition(".")[0] not in (*OWN, "experiment")]
        return (*mine, "arms=null", "seeds=null", f"arm={arm}", f"seed={seed}", *self.arms[arm], *theirs)

    def table(self) -> Table:
        """Of all finished runs of this configuration, whether this command has trained them or another."""
        runs = [run for run in read_runs(self.folder) if run.arm in self.arms and self._is_ours(run)]
        return summarise(runs, self.columns, self.arms)

    def _is_ours(self, run: RunSummary) -> bool:
        return run.finished and self.finished(self.job(run.arm, run.seed))

    def others(self, table: Table) -> list[str]:
        """A sentence on finished runs of another configuration, which lie in the folder, but are not in the table."""
        mine = {run.folder for run in table.runs}
        names = [
            f"{run.arm}/seed{run.seed}" for run in read_runs(self.folder) if run.finished and run.folder not in mine
        ]
        return [f"left out, being of another configuration: {', '.join(names)}"] if names else []


def run(config: Mapping[str, Any]) -> None:
    """What ``train.py`` does inside of Hydra: one run, or, where the configuration has arms or seeds, all of those."""
    if config["arms"] is None and config["seeds"] is None:
        _run_one(config)
        return
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("an experiment with arms or seeds starts its runs itself: leave out -m (--multirun)")
    train_all(
        Experiment(config, list(HydraConfig.get().overrides.task), job_directories()), _script(), launcher.chosen()
    )


def _run_one(config: Mapping[str, Any]) -> None:
    """One run, in one go or in phases."""
    job = HydraConfig.get()
    if launcher.chosen() and job.mode != RunMode.MULTIRUN:
        raise ConfigError(f"{launcher.GROUP}={launcher.chosen()} is for experiments; for a single run: seeds=1")
    if config["phases"] is None:
        train(config)
        return
    _refuse_ranks()
    phases.run(phases.Phased(config, list(job.overrides.task), job_directories()), _script())


def train_all(experiment: Experiment, script: Sequence[str], hand_to: str | None = None) -> Table:
    """Trains what is not finished yet, and prints and writes the table.

    Args:
        experiment: what to train.
        script: the command that trains one run, as words; overrides are added to it.
        hand_to: the launcher of Hydra's that trains; None: processes of this machine.

    Raises:
        ConfigError: an arm is wrong, or another process works on this experiment.
        SystemExit: 1 if a run has failed, 128 + the number of a signal that has stopped it.
    """
    _refuse_ranks()
    jobs = experiment.jobs()
    with locked(experiment.folder):
        write_json(experiment.folder / CONTENTS, {"arms": experiment.arms, "table": experiment.columns})
        if experiment.config["force"]:
            _set_aside(jobs)
        waiting = [job for job in jobs if not experiment.finished(job)]
        print(_header(experiment, jobs, waiting), flush=True)
        runs = _Runs(waiting, script, experiment)
        failed, stopped = runs.hand_over(hand_to) if hand_to and waiting else runs.train()
        if stopped is not None:
            print(f"\nstopped; to go on:\n  {again()}", flush=True)
            raise SystemExit(128 + stopped)
        table = experiment.table()
        print(_conclusion(experiment, table), flush=True)
    if failed:
        print(_complaints(failed), flush=True)
        raise SystemExit(1)
    return table


class _Runs:
    """Starts the runs, and tells how they end."""

    def __init__(self, jobs: Sequence[Job], script: Sequence[str], experiment: Experiment) -> None:
        self.jobs, self.script = jobs, script
        self.at_once = min(experiment.config["jobs"], len(jobs))
        self.columns, self.finished = experiment.columns, experiment.finished
        self.failed: dict[str, Failure] = {}

    def train(self) -> tuple[dict[str, Failure], int | None]:
        """Those that have failed, by name, and the signal that has ended it all, if one has."""
        stopped = work_off([partial(self._start, n) for n in range(len(self.jobs))], self.at_once, self._ended)
        return self.failed, stopped

    def hand_over(self, hand_to: str) -> tuple[dict[str, Failure], None]:
        """The same, with a launcher of Hydra's: all of them at once, and it is heard of them when all have ended."""
        print(f"{len(self.jobs)} runs go to {hand_to}; what each says: <arm>/seed<k>/train.log", flush=True)
        try:
            codes: Sequence[int | None] = launcher.launch(self.jobs, self.script)
        except launcher.GaveUp as error:
            print(error, flush=True)
            codes = [0 if self.finished(job) else None for job in self.jobs]
        for number, code in enumerate(codes):
            log = self.jobs[number].folder / LOG
            self._tell(number, code, "", log, tail(log) if log.is_file() else [])
        return self.failed, None

    def _start(self, number: int) -> Child:
        job = self.jobs[number]
        command = [*self.script, *job.overrides]
        log = job.folder / LOG
        print(f"[{number + 1}/{len(self.jobs)}] {job.name}: started, output in {report.shown(log)}", flush=True)
        if self.at_once > 1:
            print(textwrap.indent(shlex.join(command), "    "), flush=True)
        return Child(command, log, self._environment(), follow=self.at_once == 1)

    def _ended(self, number: int, child: Child, code: int) -> None:
        self._tell(number, code, f" after {clock(child.seconds())}", child.log, child.tail())

    def _tell(self, number: int, code: int | None, after: str, log: Path, words: list[str]) -> None:
        """Prints how a run has ended, and remembers one that has failed."""
        job = self.jobs[number]
        if code != 0:
            self.failed[job.name] = (log, words)
        numbers = self._numbers(job) if code == 0 else ""
        print(f"[{number + 1}/{len(self.jobs)}] {job.name}: {_how(code)}{after}{numbers}", flush=True)

    def _numbers(self, job: Job) -> str:
        """The columns of the table, of this run."""
        of_this = (run for run in read_runs(job.folder.parent.parent) if run.folder == job.folder)
        return "".join(f", {column} {shown(run.value(column))}" for run in of_this for column in self.columns)

    def _environment(self) -> dict[str, str]:
        """Threads for several runs at a time; one alone takes what it finds."""
        if self.at_once == 1:
            return {}
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        return {"OMP_NUM_THREADS": str(max(1, cores // self.at_once))}


def _how(code: int | None) -> str:
    """A run's end in words."""
    if code is None:
        return "has not come to its end"
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}" if code else "finished"


def _script() -> list[str]:
    """What trains one run: this script, with the flags that say where yaml files are, and Hydra's own overrides."""
    parsed, _ = get_args_parser().parse_known_args(sys.argv[1:])
    for flag, value in (("--config-name", parsed.config_name), ("--config-path", parsed.config_path)):
        if value:
            raise ConfigError(
                f"{flag} {value} was given, but an experiment composes its runs from configs/train.yaml: leave it out, "
                "and add yaml files of your own with --config-dir"
            )
    folder = ["--config-dir", parsed.config_dir] if parsed.config_dir else []
    ours = ("hydra.run.", "hydra.mode=", f"{launcher.GROUP}=", "hydra.launcher.")
    own = [line for line in HydraConfig.get().overrides.hydra if not line.startswith(ours)]
    return [sys.executable, sys.argv[0], *folder, *own]


def _refuse_ranks() -> None:
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "WORLD_SIZE is set, so this is one of several ranks, but an experiment with arms or seeds is one process "
            "that starts others: leave out torchrun and set trainer.devices, or train one arm with arms=null seeds=null"
        )


def _set_aside(jobs: Sequence[Job]) -> None:
    """Moves all earlier runs away at once, so that what is interrupted can go on without being forced again."""
    for job in jobs:
        with locked(job.folder):
            prepare({**job.config, "resume": "never"})


def _header(experiment: Experiment, jobs: Sequence[Job], waiting: Sequence[Job]) -> str:
    lines = [
        f"experiment {experiment.config['name']}: arms {', '.join(experiment.chosen)}; "
        f"seeds {', '.join(map(str, experiment.seeds))}; in {report.shown(experiment.folder)}"
    ]
    done = [job.name for job in jobs if job not in waiting]
    if done:
        lines.append(f"finished already, and skipped (force=true runs them again): {', '.join(done)}")
    return "\n".join(part for line in lines for part in textwrap.wrap(line, WIDTH, break_on_hyphens=False))


def _conclusion(experiment: Experiment, table: Table) -> str:
    notes = [*apart(table.runs), *experiment.others(table), *unfinished([experiment.folder])]
    written = write(table, experiment.folder, "results", notes)
    lines = ["", table.text(), ""]
    for sentence in [FOOTNOTE, *notes, *written]:
        lines += textwrap.wrap(sentence, WIDTH, break_on_hyphens=False)
    asked = ruler.known_below([run.folder for run in table.runs])
    lines += ["", *ruler.side_by_side(asked, experiment.folder)] if asked else []
    for column in table.empty_columns():
        known = ", ".join(key for key, value in table.runs[0].summary.items() if isinstance(value, int | float))
        lines += textwrap.wrap(f"no run has a number '{column}' in its summary.json; there are {known}", WIDTH)
    return "\n".join(lines)


def _complaints(failed: Mapping[str, Failure]) -> str:
    """Who has failed, with their last words."""
    lines = []
    for name, (log, words) in failed.items():
        said = f"the end of {report.shown(log)}:" if words else "it has written no log"
        lines += ["", f"{name} failed; {said}", *(f"  {line}" for line in words)]
    return "\n".join([*lines, "", f"failed: {', '.join(failed)}; to try again:\n  {again()}"])
