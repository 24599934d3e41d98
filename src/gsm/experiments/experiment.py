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

``tune: {optimizer.learning_rate: [3e-3, 6e-3]}`` has every arm try these values first, on a part of its training data
(``data.held_out=tuning``), and train with its best: these runs are jobs too, in ``logs/<name>/.tuning``.

A run ``after`` another one starts from its last weights with a fresh optimiser; with ``start_fresh: false`` it goes on
where that one stood, as a branch that ends otherwise. What several arms train alike is trained once.
``runs.train=PATH`` stands for a checkpoint that is there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.command_line import again
from gsm.config.command_line import shown as shown_path
from gsm.config.compose import search
from gsm.experiments import folder, launcher, pace
from gsm.experiments.asked import OPTUNA, Range, Tune, key_of, parse_runs, quoted
from gsm.experiments.compare import CONTENTS, apart, unfinished, write
from gsm.experiments.fit import train
from gsm.experiments.jobs import Child, Job, tail, work_off
from gsm.experiments.table import FOOTNOTE, WIDTH, RunSummary, Table, read_runs, shown
from gsm.experiments.trials import METRICS, Attempt, Evaluation, Experiment, Training, Trial, naming
from gsm.experiments.tune import EDGE
from gsm.files import read_json, write_json
from gsm.training.callbacks.progress import clock

SEVERAL = ("arms", "seeds", "runs", "tune", "starter")  # one of them makes an experiment of a configuration


def run(config: Mapping[str, Any]) -> None:
    """What ``train.py`` does inside of Hydra: one run, or, where the configuration has several, all of those."""
    job = HydraConfig.get()
    if all(config.get(name) is None for name in SEVERAL):
        if launcher.chosen() and job.mode != RunMode.MULTIRUN:
            raise ConfigError(f"{launcher.GROUP}={launcher.chosen()} is for experiments; for a single run: seeds=1")
        train(config)
    elif job.mode == RunMode.MULTIRUN:
        raise ConfigError("an experiment with arms or seeds starts its runs itself: leave out -m (--multirun)")
    else:
        train_all(Experiment(config, list(job.overrides.task), _script(config["starter"])), launcher.chosen())


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
        write_json(experiment.folder / CONTENTS, experiment.contents())
        if config["force"] or config["resume"] == "never":
            known = [*experiment.tried, *(trial for trial in trials if config["force"] or experiment.choice(trial.arm))]
            anew = [trial for trial in known if config["force"] or not trial.finished()]
            _set_aside(anew, experiment.held)
            experiment = Experiment(config, experiment.given, experiment.script)  # as of what is finished now
            trials = experiment.trials()
        for job in [] if hand_to else dict.fromkeys(job for trial in trials for job in trial.needs):
            if isinstance(job, Evaluation) and not (job.finished() and (job.after is None or job.after.finished())):
                with naming(f"run {job.folder.name}"):
                    job.measure.require()
        failed = _tune(experiment, trials, hand_to)
        work = _Work(experiment, [trial for trial in experiment.trials() if trial.arm not in failed])
        work.failed |= failed
        print(work.header(), flush=True)
        work.work_off(hand_to)
        table = experiment.table()
        write_json(experiment.folder / CONTENTS, experiment.contents())
        notes = _notes(experiment, table)
        print("\n".join(["", table.text(), "", *_filled([FOOTNOTE, *notes, *_unknown(table)])]), flush=True)
        _conclude_evaluations(experiment, table)  # first, as the page has their tables too
        written = write(table, experiment.folder, [experiment.folder], "results", notes)
        print("\n".join(["", *_filled(written)]), flush=True)
    if work.failed:
        print(work.complaints(), flush=True)
        raise SystemExit(1)
    return table


def _tune(experiment: Experiment, trials: Sequence[Trial], hand_to: str | None) -> dict[str, list[str]]:
    """Tries values until every arm has what wins; returns what is said of arms that have nothing, by name.

    Each round tries what follows from those before, of all arms: at first the grids, then what they grow by; or what
    Optuna chooses.
    """
    failed: dict[str, list[str]] = {}
    rounds, later = 0, [trial for trial in trials if not (experiment.choice(trial.arm) and trial.finished())]
    while attempts := experiment.attempts([arm for arm in experiment.chosen if arm not in failed]):
        _set_aside([attempt for attempt in attempts if attempt.outdated], experiment.held)
        left = experiment.left({attempt.arm for attempt in attempts})  # 0: of grids, whose end nobody knows
        work = _Work(experiment, attempts, [] if rounds else later, max(1.0, left / len(attempts)))
        print(_tuning(experiment, attempts, rounds, len(later)), flush=True)
        work.work_off(hand_to, tells=not (rounds and left))
        for attempt in attempts:
            said = [line for job in attempt.jobs.values() for line in work.failed.get(job.name, [])]
            if not said and not attempt.finished():  # a callback has ended it
                said = [f"{_name(attempt)} has ended before its last step, and so cannot be compared"]
            failed |= {attempt.arm: [*failed.get(attempt.arm, []), *said]} if said else {}
        rounds += 1
    for arm in experiment.chosen:
        choice = experiment.choice(arm) if arm not in failed else None
        if choice and not choice.found:
            failed[arm] = [f"{arm}: every value that was tried has diverged: {_values(choice.grids)}"]
    return failed


def _tuning(experiment: Experiment, attempts: Sequence[Attempt], rounds: int, later: int) -> str:
    """What a round tries, and why."""
    tune = experiment.tune
    assert tune is not None  # or there were no attempts
    if rounds:
        named = ", ".join(map(_name, attempts))
        why = "the best stands at the edge of what was tried, so that grids grow by a value"
        return "\n" + "\n".join(_filled([f"{'Optuna chooses' if tune.tuner == OPTUNA else why}: {named}"]))
    arms = dict.fromkeys(attempt.arm for attempt in attempts)
    more = f", and up to {tune.grow} more values for an arm whose best stands at an edge" if tune.grow else ""
    count = f"{len(attempts)} attempts{more}"
    if tune.tuner == OPTUNA:
        count = f"{experiment.left(list(arms))} attempts that Optuna chooses, {', '.join(map(_name, attempts))} first"
    line = (
        f"experiment {experiment.config['name']} tunes {', '.join(arms)} first, on a part of the training data, by "
        f"{_decides(tune)}: {_values(tune.grids)}; {count}; then {later} runs with what has won"
    )
    return "\n".join(_filled([line]))


def _name(attempt: Attempt) -> str:
    return f"{attempt.arm} {_values({key: [value] for key, value in attempt.values.items()})}"


def _values(grids: Mapping[str, Sequence[Any] | Range]) -> str:
    listed = {
        key: str(values) if isinstance(values, Range) else ", ".join(map(quoted, values))
        for key, values in grids.items()
    }
    return "; ".join(f"{key}={values}" for key, values in listed.items())


def _decides(tune: Tune) -> str:
    return ", else ".join(f"{column} ({'highest' if more else 'lowest'})" for column, more in tune.by.items())


class _Work:
    """Has the jobs of trials worked off, keeps their summaries, and tells how each job ends.

    Args:
        experiment: that they are of.
        trials: what is to be done.
        later: what will be done when these are, for how long that takes.
        times: how often as many trials are to come, these among them, before that.
    """

    def __init__(
        self, experiment: Experiment, trials: Sequence[Trial], later: Sequence[Trial] = (), times: float = 1.0
    ) -> None:
        self.experiment, self.trials, self.later, self.times = experiment, trials, later, times
        self.done: dict[Job, None] = {}  # in their order
        self.waiting: list[Job] = []
        for job in dict.fromkeys(job for trial in trials for job in trial.needs):
            is_done = job.after not in self.waiting and job.finished()
            self.done |= {job: None} if is_done else {}
            self.waiting += [] if is_done else [job]
        self.at_once = min(experiment.config["jobs"], len(self.waiting))
        self.failed: dict[str, list[str]] = {}  # what is said of each, by name
        self.diverged: set[Job] = set()
        self.seen: dict[Job, int] = {}  # bytes of its metrics that were looked at
        for trial in trials:
            self._conclude(trial)  # which a command that was killed has not

    def work_off(self, hand_to: str | None, tells: bool = True) -> None:
        """Says how long it will take, if it ``tells``, and does it. Raises SystemExit after a signal."""
        if takes := self.takes() if tells and not hand_to else "":
            print(takes, flush=True)
        stopped = self.hand_over(hand_to) if hand_to and self.waiting else self.train()
        if stopped is not None:
            print(f"\nstopped; to go on:\n  {again()}", flush=True)
            raise SystemExit(128 + stopped)

    def train(self) -> int | None:
        """With processes of this machine; returns the signal that has ended it all, if one has."""
        stopped = work_off(self.waiting, self.at_once, self._start, self._ended, self._stops)
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
            f"seeds {', '.join(map(str, experiment.seeds))}; in {shown_path(experiment.folder)}"
        ]
        if self.done:
            names = ", ".join(job.name for job in self.done)
            lines.append(f"finished already, and skipped (force=true runs them again): {names}")
        won = {arm: choice.shown() for arm, choice in experiment.won.items() if arm in experiment.chosen}
        named = (f"{arm} {', '.join(map('='.join, values.items()))}" for arm, values in won.items())
        lines += [f"tuned: {'; '.join(named)}"] if won else []
        for line in _without_effect(self.trials[0]) if self.trials else []:
            lines.append(f"{line} changes nothing, as every run sets that: ++runs.<name>.{line} would")
        return "\n".join(part for line in lines for part in textwrap.wrap(line, WIDTH, break_on_hyphens=False))

    def takes(self) -> str:
        """How long this machine will train, by a batch of every arm; empty below a minute."""
        later = [job for trial in self.later for job in trial.jobs.values()]
        left = [job for job in dict.fromkeys([*self.waiting, *later]) if isinstance(job, Training)]
        kinds = [(_kind(job.config), job.begins) for job in left]
        once = dict(zip(kinds, left, strict=True))
        found = {kind: pace.seconds(job.config, job.begins, gpu=False) for kind, job in once.items()}
        often = [self.times if job in self.waiting else 1.0 for job in left]
        known = [one * times for kind, times in zip(kinds, often, strict=True) if (one := found[kind]) is not None]
        takes = pace.told(sum(known))
        least = "at least " if len(known) < len(kinds) else ""
        measured = sum(isinstance(job, Evaluation) for job in [*self.waiting, *later])
        then = f"; then {measured} evaluations" if measured else ""
        return f"training takes {least}{takes} here, by a batch of every arm timed just now{then}" if takes else ""

    def complaints(self) -> str:
        """Which jobs have failed, with their last words."""
        lines = [line for said in self.failed.values() for line in ["", *said]]
        return "\n".join([*lines, "", f"failed: {', '.join(self.failed)}; to try again:\n  {again()}"])

    def _start(self, job: Job) -> Child:
        print(f"{self._label(job)}: started, output in {shown_path(job.log)}", flush=True)
        if self.at_once > 1:
            print(textwrap.indent(shlex.join(job.command), "    "), flush=True)
        self._note(job, "running")
        self.seen[job] = _size(job.log.parent / METRICS)  # which may be of an earlier run, that this one moves away
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        threads = {"OMP_NUM_THREADS": str(max(1, cores // self.at_once))}  # one alone takes what it finds
        return Child(job, threads if self.at_once > 1 else {}, follow=self.at_once == 1)

    def _ended(self, job: Job, code: int | None, child: Child | None = None) -> None:
        """Prints how a job has ended, notes it, and remembers one that has failed."""
        how, numbers = _how(code), ""
        having = self._having(job)
        tried = [one for one in having if isinstance(one, Attempt) and one.decides is job]
        pruned = [one for one in tried if one.pruned or code == 0 and self.experiment.prunes(one)]
        if pruned:
            for one in pruned:
                one.conclude_pruned()
            how = f"pruned, worse than the median of those before at step {pruned[0].pruned}"
        elif (code or 0) > 0 and any(isinstance(one, Attempt) and one.note_divergence(job) for one in having):
            self.diverged.add(job)
            how = "diverged, which counts as the worst"
        elif job.after in self.diverged:
            self.diverged.add(job)
            how = f"not started, as {job.after.name} has diverged"
        elif code == 0:
            self.done[job] = None
            numbers = "".join(self._conclude(trial) for trial in self.trials if job in trial.jobs.values())
        elif job.after and job.after.name in self.failed:
            how = f"not started, as {job.after.name} has failed"
            self.failed[job.name] = [f"{job.name}: {how}"]
        else:
            words = child.tail() if child else tail(job.log)
            said = f"the end of {shown_path(job.log)}:" if words else "it has written no log"
            self.failed[job.name] = [f"{job.name} failed; {said}", *(f"  {word}" for word in words)]
            self._note(job, "failed", how)
        print(f"{self._label(job)}: {how}{f' after {clock(child.seconds())}' if child else ''}{numbers}", flush=True)

    def _stops(self, job: Job) -> bool:
        """Whether all attempts that a running job is of have been pruned by now."""
        having = [one for one in self._having(job) if isinstance(one, Attempt) and one.decides is job]
        size = _size(job.log.parent / METRICS) if having else 0
        if not having or size == self.seen[job]:
            return False
        self.seen[job] = size
        return all([self.experiment.prunes(one) for one in having])

    def _having(self, job: Job) -> list[Trial]:
        return [trial for trial in self.trials if job in trial.jobs.values()]

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


def _size(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0


def _kind(config: Mapping[str, Any]) -> str:
    """The same for runs that take as long: neither seed nor the optimiser's numbers nor what is held out matter."""
    optimizer, data = config.get("optimizer") or {}, config.get("data") or {}
    alike = {"seed": 0, "start_from": None, "optimizer": optimizer.get("_target_")}
    return folder.identity({**config, **alike, "data": {**data, "held_out": None}})


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
        mine = [job for job in trial.needs if job in waiting]
        met = [key for key, part in parts.items() if {*mine, *(job.after for job in mine)} & {*part}]
        jobs = [job for key in met for job in parts.pop(key)] + mine
        if mine:
            parts[met[0] if met else trial.overrides] = list(dict.fromkeys(jobs))
    return parts


def _script(starter: str | None = None) -> list[str]:
    """What trains one run: this script and what starts it, with the flag that says where yaml files are, and Hydra's
    own overrides."""
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
    return [*started_by(starter), sys.argv[0], *own_yamls, *(line for line in own if not line.startswith(ours))]


def started_by(starter: str | None) -> list[str]:
    """The words that start a run: this Python, or what the configuration's ``starter`` names. Raises ConfigError."""
    try:
        words = shlex.split(starter) if starter else [sys.executable]
    except ValueError as error:
        raise ConfigError(f"starter is {starter!r:.60}, which is no command: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"starter is {starter!r:.60}, but there is no such command here: give its path")
    return words


def _refuse_ranks() -> None:
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):  # torchrun's, srun's
        if os.environ.get(name, "1") != "1":
            raise ConfigError(
                f"{name} is {os.environ[name]}, so this is one of several ranks, but an experiment is one process that "
                "starts others: say starter='torchrun ...' or starter='srun ...' instead, which starts each of its runs"
            )


def _set_aside(trials: Sequence[Trial], held: Path) -> None:
    """Moves earlier runs away at once, so that what is interrupted can go on without being forced again."""
    for trial in trials:
        with contextlib.nullcontext() if trial.folder == held else folder.locked(trial.folder):
            folder.prepare({**trial.config, "resume": "never", "start_from": None})  # which may have moved already


def _notes(experiment: Experiment, table: Table) -> list[str]:
    """Sentences that belong to the table: what does not compare, what it leaves out, and what is not finished."""
    mine = {run.folder for run in table.runs}
    others = [run for run in read_runs(experiment.folder) if run.finished and run.folder not in mine]
    names = ", ".join(f"{run.arm}/seed{run.seed}" for run in others)
    left_out = [f"left out, being of another configuration: {names}"] if names else []
    return [*_tuned(experiment), *apart(table.runs), *left_out, *unfinished([experiment.folder])]


def _tuned(experiment: Experiment) -> list[str]:
    """How values were chosen, which arms tried more than the others, and what has diverged."""
    if experiment.tune is None:
        return []
    seeds = f"{'seeds' if len(experiment.tune.seeds) > 1 else 'seed'} {', '.join(map(str, experiment.tune.seeds))}"
    said = [
        f"tuned on a part of the training data, which no number above is of, by {_decides(experiment.tune)}, {seeds}: "
        f"the best of {_values(experiment.tune.grids)}; '{EDGE.strip()}' marks the end of what was tried"
    ]
    by_grid = experiment.won if experiment.tune.tuner != OPTUNA else {}
    grown = {arm: choice.grids for arm, choice in by_grid.items() if choice.grids != experiment.grids(arm)}
    more = [f"{arm} {_values(grids)}" for arm, grids in grown.items()]
    lost = [_name(attempt) for attempt in experiment.tried if attempt.diverged and not attempt.pruned]
    said += [f"tried further, as the best stood at an edge: {'; '.join(more)}"] if more else []
    said += [f"diverged, and counted as the worst: {'; '.join(lost)}"] if lost else []
    ended = [f"{_name(attempt)} at step {attempt.pruned}" for attempt in experiment.tried if attempt.pruned]
    return said + ([f"pruned, being worse than the median of those before: {'; '.join(ended)}"] if ended else [])


def _unknown(table: Table) -> list[str]:
    """A sentence for each column that no run has a number for."""
    known = ", ".join(k for run in table.runs[:1] for k, value in run.summary.items() if isinstance(value, int | float))
    return [f"no run has a number '{name}' in its summary.json; there are {known}" for name in table.empty_columns()]


def _filled(sentences: Sequence[str]) -> list[str]:
    return [
        line for one in sentences for line in textwrap.wrap(one, WIDTH, break_on_hyphens=False, break_long_words=False)
    ]


def _conclude_evaluations(experiment: Experiment, table: Table) -> None:
    """Has every evaluation say what its results are together, as evaluate.py does of several checkpoints: the paper's
    tables and curves with ours beside, in ``<name of the run>.md`` and others."""
    trials = [experiment.trial(run.arm, run.seed) for run in table.runs]
    for name in dict.fromkeys(name for trial in trials for name in trial.jobs):
        jobs = [(trial, trial.jobs.get(name)) for trial in trials]
        found = [(trial, job) for trial, job in jobs if isinstance(job, Evaluation)]
        if len(found) > 1 and len({job.words for _, job in found}) == 1:  # what is asked otherwise does not compare
            print(f"\n{name}: {' '.join(found[0][1].words) or 'held out'}\n")
            _conclude_evaluation(found, experiment.folder / f"{name}.json")


def _conclude_evaluation(jobs: Sequence[tuple[Trial, Evaluation]], place: Path) -> None:
    measure = jobs[0][1].measure
    try:
        results = [
            measure.written_in(job.folder, {"experiment": trial.config["name"], "arm": trial.arm, "seed": trial.seed})
            for trial, job in jobs
        ]
        measure.conclude(results, place)
    except (ConfigError, OSError) as error:  # windows that are not the same, a file that is gone: the runs are whole
        print(f"not side by side: {error}", flush=True)


def _without_effect(trial: Trial) -> list[str]:
    """Overrides of all runs that every one which trains says otherwise."""
    runs = parse_runs(trial.config["runs"]) if trial.config["runs"] else []
    said = [{key_of(line) for line in run.lines} for run in runs if not (run.measures or run.given)]
    return [line for line in trial.overrides if said and key_of(line) in set.intersection(*said)]
