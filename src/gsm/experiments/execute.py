"""Experiments: one command that starts the runs of all arms and seeds, and puts their numbers in one table.

    python train.py experiment=paper_long_context

is the parent process, which trains nothing itself. ``gsm.experiments.runs`` first composes and checks all runs, and
``gsm.experiments.tune`` those that choose the values of an arm. The unfinished ones become processes (``python train.py
... arm=gsm start_from=...``, or ``python evaluate.py checkpoint=...``). The command can be stopped and repeated at any
time.

docs/experiments.md has the entries of a configuration, docs/tuning.md those of ``tune``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from gsm import threads
from gsm.config.address import CONTENTS, TUNING
from gsm.config.check import ConfigError
from gsm.config.command_line import again, path_text
from gsm.experiments.compare import apart, unfinished, write
from gsm.experiments.entries import naming
from gsm.experiments.jobs import Child, tail, work_off
from gsm.experiments.runs import Experiment, Run, Trial, in_order
from gsm.experiments.table import FOOTNOTE, Table, list_trial, number_text, read_runs
from gsm.experiments.tune import Tuning
from gsm.files import write_json
from gsm.signals import SIGNALS
from gsm.tables import filled
from gsm.training.callbacks.progress import clock
from gsm.training.folder import is_held


def run(config: Mapping[str, Any]) -> None:
    """Train all runs of an experiment in a job of Hydra. Raises ConfigError, SystemExit."""
    train_all(Experiment(config, list(HydraConfig.get().overrides.task), _flags()))


def expand(config: Mapping[str, Any], given: Sequence[str] = (), flags: Sequence[str] = ()) -> list[Run]:
    """Return the runs of a configuration in the order in which they start, and write nothing.

    A run that several arms need stands once. With ``tune`` the attempts of a grid come first; an arm has its best
    values as soon as they are known.

    Args:
        config: composed (``gsm.config.compose.compose``).
        given: the overrides that it was composed from.
        flags: overrides of Hydra's own, for the command of each run.

    Raises:
        ConfigError: an arm, a run or a value cannot be trained.
    """
    experiment = Experiment(config, [line for line in given if line.partition("=")[0] != "plan"], flags)
    tuning = Tuning(experiment)
    return in_order([*tuning.grid(), *experiment.with_arms(experiment.arms | tuning.settled().arms).trials()])


def print_plan(config: Mapping[str, Any]) -> None:
    """Print the command of each run that is not finished, in the order in which they can start, and write nothing.

    A sentence on them goes to the standard error. Raises ConfigError.
    """
    runs = expand(config, list(HydraConfig.get().overrides.task), _flags())
    waiting = [run for run in runs if not run.finished()]
    for run in waiting:
        print(run.typed)
    sentences = [f"{len(waiting)} of {len(runs)} runs are not finished"]
    if training := [run.label for run in waiting if is_held(run.find_folder())]:
        sentences.append(f"a process trains {', '.join(training)} now")
    if any(run.experiment.name == TUNING for run in waiting):
        sentences.append("arms have their own values until they are tuned: ask again after the runs in tuning/")
    print(filled(sentences), file=sys.stderr)


def train_all(experiment: Experiment) -> Table:
    """Start the runs that are not finished, then print and write the table.

    Raises:
        ConfigError: an arm or a run is wrong.
        SystemExit: 1 if a run has failed, 128 + the signal's number after a signal.
    """
    _refuse_ranks()
    tuning, untuned = Tuning(experiment), experiment.trials()  # both raise for a run that cannot be trained or measured
    for run in in_order(untuned):
        if run.checkpoint and not run.finished():
            with naming(f"run {run.label}"):
                run.measure.require()

    def train_attempts(attempts: Sequence[Trial]) -> dict[str, list[str]]:
        work = _Work(experiment, attempts, later=[trial for trial in untuned if not trial.finished()])
        work.execute()
        return work.failed

    _describe(experiment, tuning)
    failed = tuning.train(train_attempts)
    settled = tuning.settled()
    work = _Work(settled, settled.trials())
    work.failed |= failed
    print(filled([*work.header(), *tuning.header()]), flush=True)
    work.execute()
    _describe(experiment, tuning)
    table = _report(settled, list(experiment.arms), tuning)
    if work.failed:
        print(work.complaints(), flush=True)
        raise SystemExit(1)
    return table


class _Work:
    """Start the runs of trials, keep their summaries, and print how each run ends.

    Args:
        experiment: the experiment of the trials.
        trials: the trials to finish.
        later: trials that start after these; they count in the time left.
    """

    def __init__(self, experiment: Experiment, trials: Sequence[Trial], later: Sequence[Trial] = ()) -> None:
        self.experiment, self.trials = experiment, trials
        runs = in_order(trials)
        self.done = {run: None for run in runs if run.finished()}
        self.waiting = [run for run in runs if run not in self.done]
        self.at_once = min(experiment.config["jobs"], len(self.waiting))
        self.seconds: list[float] = []  # durations of the finished trainings
        self.left = dict.fromkeys([*self.waiting, *(run for trial in later for run in trial.runs.values())])
        self.failed: dict[str, list[str]] = {}  # error lines, by label
        for trial in trials:
            list_trial(Path(trial.config["folder"]).parent, trial.line())

    def execute(self) -> None:
        """Start all runs. Raises SystemExit after a signal."""
        stopped = work_off(self.waiting, self.at_once, self._start, self._ended)
        if stopped is not None:
            print(f"\nstopped; to go on:\n  {again()}", flush=True)
            if stopped in (signal.SIGUSR1, signal.SIGUSR2) and callable(signal.getsignal(stopped)):
                signal.raise_signal(stopped)  # a cluster's warning: submitit queues the job once more
            raise SystemExit(128 + stopped)

    def header(self) -> list[str]:
        """Return sentences on the arms and seeds, and the finished runs."""
        experiment = self.experiment
        lines = [
            f"experiment {experiment.config['name']}: arms {', '.join(experiment.chosen)}; "
            f"seeds {', '.join(map(str, experiment.seeds))}; in {path_text(experiment.folder)}"
        ]
        if self.done:
            others = [run for run in self.done if run.experiment != experiment.folder]
            places = {run: f" ({path_text(run.find_folder())})" for run in others}
            names = ", ".join(run.label + places.get(run, "") for run in self.done)
            lines.append(f"finished already, and skipped: {names}")
        return lines

    def complaints(self) -> str:
        """Return the error lines of failed runs, their names, and the command to try again."""
        lines = [line for words in self.failed.values() for line in ["", *words]]
        return "\n".join([*lines, "", f"failed: {', '.join(self.failed)}; to try again:\n  {again()}"])

    def _start(self, run: Run) -> Child:
        print(f"{self._label(run)}: started, output in {path_text(run.find_log())}", flush=True)
        if self.at_once > 1:
            print(textwrap.indent(run.typed, "    "), flush=True)
        # A single run uses all idle cores.
        share = {"OMP_NUM_THREADS": str(max(1, threads.cores() // self.at_once))} if self.at_once > 1 else {}
        return Child(run, share, follow=self.at_once == 1)

    def _ended(self, run: Run, code: int | None, child: Child | None = None) -> None:
        """Print how a run has ended, note it, and remember a failure."""
        how, numbers, stopped = _how(code), "", _signal(code) in SIGNALS
        self.left.pop(run, None)
        if code == 0:
            self.done[run] = None
            numbers = "".join(self._numbers(trial) for trial in self.trials if run in trial.runs.values())
        elif run.after and run.after.label in self.failed:
            how = f"not started, as {run.after.label} has failed"
            self.failed[run.label] = [f"{run.label}: {how}"]
        else:
            words = tail(run.find_log())
            where = f"the end of {path_text(run.find_log())}:" if words else "it has written no log"
            self.failed[run.label] = [f"{run.label} failed; {where}", *(f"  {word}" for word in words)]
            run.fail("interrupted" if stopped else "failed", how if stopped else f"its process {how}")
        after = f" after {clock(child.seconds())}" if child else ""
        if child and run.config and code == 0:
            self.seconds.append(child.seconds())
        print(f"{self._label(run)}: {how}{after}{numbers}{self._time_left()}", flush=True)

    def _time_left(self) -> str:
        """Return the time left, with the mean duration of the finished trainings; empty if there is none."""
        count = sum(run.config is not None for run in self.left)
        if not (self.seconds and count):
            return ""
        seconds = count * sum(self.seconds) / len(self.seconds) / min(self.at_once, count)
        return f"; {clock(seconds)} left for {count} run{'s' if count > 1 else ''}"

    def _label(self, run: Run) -> str:
        return f"[{self.waiting.index(run) + 1}/{len(self.waiting)}] {run.label}"

    def _numbers(self, trial: Trial) -> str:
        """Return the columns of a trial, all of its runs done, as words; else an empty text."""
        if not self.done.keys() >= {*trial.runs.values()}:
            return ""
        summary = trial.summary()
        columns = self.experiment.columns_of([summary])
        return "".join(f", {column} {number_text(summary.value(column))}" for column in columns)


def _how(code: int | None) -> str:
    """Return the end of a run in words."""
    if code is None:
        return "has not come to its end"
    if ended := _signal(code):
        return f"{'interrupted' if ended in SIGNALS else 'ended'} by {ended.name}"
    return f"ended with exit code {code}" if code else "finished"


def _signal(code: int | None) -> signal.Signals | None:
    """Return the signal that has ended a process, at once or by way of its exit code."""
    if code is not None:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code if code < 0 else code - 128)
    return None


def _flags() -> list[str]:
    """Return the overrides of Hydra itself that every run has."""
    own = ("hydra.run.", "hydra.sweep.", "hydra.mode=", "hydra/launcher=", "hydra.launcher.", "hydra.searchpath=")
    return [line for line in HydraConfig.get().overrides.hydra if not line.startswith(own)]


def _refuse_ranks() -> None:
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):  # torchrun's, srun's
        if os.environ.get(name, "1") != "1":
            raise ConfigError(
                f"{name} must be 1 or unset for an experiment, one process that starts others, got {os.environ[name]}; "
                "use trainer.devices, or the runs that plan=true prints, one by one"
            )


def _describe(experiment: Experiment, tuning: Tuning) -> None:
    """Write the arms with their overrides, the labels, the columns of the table, and the overrides of the command, for
    `compare.py` and notebooks."""
    arms = experiment.arms | tuning.settled().arms
    told = {"arms": arms, "labels": experiment.labels, "table": experiment.columns}
    write_json(experiment.folder / CONTENTS, {**told, "overrides": list(experiment.given), **tuning.contents()})


def _report(experiment: Experiment, arms: Sequence[str], tuning: Tuning) -> Table:
    """Print the table and its notes, and write the results; return the table."""
    table = replace(experiment.table(arms), tuned=tuning.texts())
    notes = [*tuning.notes(), *_notes(experiment, table)]
    known = ", ".join(k for run in table.runs[:1] for k, value in run.summary.items() if isinstance(value, int | float))
    empty = [f"no run has a number '{name}' in its summary.json; there are {known}" for name in table.empty_columns()]
    sentences = [*table.verdicts(), *table.baselines(), FOOTNOTE, *table.meanings(), *notes, *empty]
    print(f"\n{table.text()}\n\n{filled(sentences)}", flush=True)
    _conclude_evaluations(experiment, table)  # first, as the page has their tables too
    print(f"\n{filled(write(table, experiment.folder, [experiment.folder], 'results', notes))}", flush=True)
    return table


def _notes(experiment: Experiment, table: Table) -> list[str]:
    """Return sentences on the table: runs that do not compare, are left out, or not finished."""
    mine = [run.parts for run in table.runs]
    others = [run for run in read_runs(experiment.folder) if run.finished and run.parts not in mine]
    names = ", ".join(run.folder.name for run in others)
    left_out = [f"not in the table, because their configuration differs: {names}"] if names else []
    return [*apart(table.runs), *left_out, *unfinished([experiment.folder])]


def _conclude_evaluations(experiment: Experiment, table: Table) -> None:
    """Compare the results of each evaluation over all arms, as evaluate.py does for several checkpoints.

    The paper's tables and curves are added. The files are ``<name of the run>.md`` and others.
    """
    trials = [experiment.trial(run.arm, run.seed) for run in table.runs]
    for name in dict.fromkeys(name for trial in trials for name in trial.runs):
        pairs = [(trial, run) for trial in trials if (run := trial.runs.get(name)) and run.checkpoint]
        if len(pairs) < 2 or len({run.words for _, run in pairs}) > 1:  # other arguments do not compare
            continue
        print(f"\n{name}: {' '.join(pairs[0][1].words) or 'held out'}\n")
        measure = pairs[0][1].measure
        try:
            runs = [
                measure.read(
                    run.find_folder(),
                    {"experiment": trial.config["name"], "arm": experiment.names[trial.arm], "seed": trial.seed},
                )
                for trial, run in pairs
            ]
            measure.conclude(runs, experiment.folder / name)
        except (ConfigError, OSError) as error:  # other windows, or a missing file: the runs themselves are complete
            print(f"not side by side: {error}", flush=True)
