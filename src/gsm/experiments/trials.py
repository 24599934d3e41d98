"""The trials of an experiment, an arm with a seed each, and the jobs that they consist of: composed, not yet begun."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.compose import compose, refuse_unnamed
from gsm.config.load import CheckpointError, checkpoint_file, instantiate
from gsm.config.naming import label
from gsm.evaluation import commands
from gsm.evaluation.checkpoints import TRAINED
from gsm.evaluation.measure import Measure
from gsm.evaluation.ruler import Ruler
from gsm.experiments import folder, trainers, weights
from gsm.experiments.asked import (
    OPTUNA,
    OWN,
    Range,
    Run,
    first,
    is_group,
    key_of,
    last,
    parse_runs,
    quoted,
    read_arms,
    read_chosen,
    read_columns,
    read_seeds,
    read_tune,
)
from gsm.experiments.jobs import Job
from gsm.experiments.table import RunSummary, Table, read_runs, summarise
from gsm.experiments.tune import Choice, Values, search
from gsm.files import read_json, write_json
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.callbacks.summary import VALIDATION

if TYPE_CHECKING:
    from gsm.experiments.study import Outcome, Study

TUNING = ".tuning"  # in an experiment's folder; nothing that looks for runs looks there
METRICS = "metrics.csv"
DIVERGED, PRUNED = "diverged.json", "pruned.json"  # in an attempt's: why it has not come to its end, and need not


@dataclass(frozen=True, eq=False)
class Training(Job):
    """Trains with this configuration."""

    config: Mapping[str, Any] = field(kw_only=True, repr=False)

    @property
    def folder(self) -> Path:
        """Where it trains."""
        return Path(self.config["folder"])

    @property
    def begins(self) -> int:
        """The step that it begins at: of a branch, the one that the job before it ends at."""
        before = self.after.config if isinstance(self.after, Training) and weights.is_branch(self.config) else None
        return before["trainer"]["max_steps"] if before else 0

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
        found = {"status": "finished", **self._measured(), "metrics": self.measure.metrics_in(self.folder)}
        write_json(self.folder / "summary.json", found)

    @property
    def measure(self) -> Measure:
        """What these arguments ask for, but for the checkpoint."""
        return commands.asked(self.words)

    def _measured(self) -> dict[str, Any]:
        return {"command": list(self.words), "checkpoint": weights.digest(self.checkpoint)}


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

    @property
    def needs(self) -> list[Job]:
        """Its jobs, each behind those that it waits for, of which some may be of another arm."""
        found: dict[Job, None] = {}
        for job in self.jobs.values():
            chain: list[Job] = []
            while job is not None and job not in found:
                chain.append(job)
                job = job.after
            found |= dict.fromkeys(reversed(chain))
        return [*found]

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


@dataclass(frozen=True)
class Attempt(Trial):
    """An arm with values that are tried, trained and measured on a tuning split, in a folder that no table is made of.

    Attributes:
        values: what is tried, by key.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def finished(self) -> bool:
        """Whether it has come to its end, or has diverged, and would again, or was pruned."""
        return self.diverged is not None or self.pruned is not None or super().finished()

    @property
    def diverged(self) -> str | None:
        """Why it has not come to its end; None: it has, or was not tried."""
        return (self._known(DIVERGED) or {}).get("reason")

    @property
    def pruned(self) -> int | None:
        """The step at which its validation was worse than that of most others; None: it never was."""
        step = (self._known(PRUNED) or {}).get("step")
        return step if type(step) is int else None

    @property
    def outdated(self) -> bool:
        """Whether one of another configuration was pruned here, which is nothing to go on with."""
        return self.pruned is None and (self.folder / PRUNED).is_file()

    @property
    def decides(self) -> Training:
        """The job whose validations are what it is judged by: the last that trains."""
        return [job for job in self.jobs.values() if isinstance(job, Training)][-1]

    def curve(self, by: Mapping[str, bool]) -> dict[int, float]:
        """What its validations have found, by step, lower is better: up to where it was pruned, but for the last one.

        Args:
            by: the columns that decide, all of them known while a run trains, and whether more of them is better.
        """
        found, pruned = read_metrics(self.decides.folder / METRICS), self.pruned
        end = self.decides.config["trainer"]["max_steps"] if pruned is None else pruned + 1
        for column, more_is_better in by.items():
            if VALIDATION[column] in found:
                values = found[VALIDATION[column]].items()
                return {step: -value if more_is_better else value for step, value in values if step < end}
        return {}

    def note_pruned(self, step: int) -> None:
        """Remembers that this is how far it is trained. Raises OSError."""
        write_json(self.folder / PRUNED, {"step": step, "trained": self._trains()})

    def conclude_pruned(self) -> None:
        """Has its summary say so, once its process has ended. Raises OSError."""
        place = self.decides.folder / "summary.json"
        reason = f"its validation was worse than the median of those before at step {self.pruned}"
        write_json(place, {**(read_json(place) or {}), "status": "pruned", "reason": reason})

    def note_divergence(self, job: Job) -> bool:
        """Whether a job of this attempt that has failed has diverged, which is then remembered. Raises OSError."""
        told = read_json(job.log.parent / "summary.json") or {}
        reason = str(told.get("reason"))
        if told.get("status") != "failed" or not reason.startswith(FloatingPointError.__name__):
            return False
        write_json(self.folder / DIVERGED, {"reason": reason, "trained": self._trains()})
        return True

    def cost(self, by: Mapping[str, bool]) -> float:
        """The number that decides, so that lower is better; infinite if it has diverged or was pruned. Raises
        ConfigError where there is none."""
        if self.diverged is not None or self.pruned is not None:
            return math.inf
        summary = RunSummary(self.arm, self.seed, self.folder, read_json(self.folder / "summary.json") or {})
        for column, more_is_better in by.items():
            value = summary.number(column)
            if value is not None:
                return math.inf if not math.isfinite(value) else -value if more_is_better else value
        raise ConfigError(
            f"tune decides by {' or '.join(by)}, which {self.folder} has no number of in its summary.json: say tune.by"
        )

    def _known(self, file: str) -> dict[str, Any] | None:
        """What was noted of this very training; None: nothing."""
        known = read_json(self.folder / file)
        return known if known and known.get("trained") == self._trains() else None

    def _trains(self) -> list[str]:
        jobs = (job for job in self.jobs.values() if isinstance(job, Training))
        return [folder.identity({**job.config, "start_from": None}) for job in jobs]


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
        tune: what each arm is tuned over first; None: nothing.
        choices: where the search of an arm has ended, of those of which it is known by now.

    Raises:
        ConfigError: arms, seeds, jobs or table cannot be used.
    """

    def __init__(self, config: Mapping[str, Any], given: Sequence[str] = (), script: Sequence[str] = ()) -> None:
        keys = {key_of(line) for line in given}
        if "folder" in keys:
            raise ConfigError("folder= is one run's, but this experiment has several: choose logs= or name= instead")
        self.config, self.given, self.script = config, given, script
        self.arms = read_arms(config["arms"]) if config["arms"] is not None else {str(config["arm"]): []}
        self.chosen = read_chosen(config["arm"], self.arms) if "arm" in keys else list(self.arms)
        if {"seed", "seeds"} <= keys:
            raise ConfigError(
                f"seed={config['seed']} and seeds={config['seeds']} were both given: leave one of them out"
            )
        one_seed = config["seeds"] is None or "seed" in keys
        self.seeds = [config["seed"]] if one_seed else read_seeds(config["seeds"])
        self.columns = read_columns(config["table"])
        self.tune = read_tune(config.get("tune"), self.columns, config["runs"])
        self._trials: dict[tuple[str, int], Trial] = {}  # to compose one takes a third of a second
        self._attempts: dict[tuple[str, int, str], Attempt] = {}
        self._costs: dict[tuple[str, int, str], float] = {}  # of those that are finished
        self.choices: dict[str, Choice] = {}
        self._outcomes: dict[tuple[str, str], Outcome] = {}  # of those of which all is known
        self._studies: dict[str, Study] = {}  # told of all attempts but those of the round that goes on
        self._alike: dict[tuple[str, str], Training] = {}

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
        """What is to be trained, seed by seed, so that arms can be compared early. Raises ConfigError, for any arm.

        An arm that is not tuned yet has the first values of its grids.
        """
        for arm in self.chosen:
            self.choice(arm)
        found = [self.trial(arm, seed) for seed in self.seeds for arm in self.chosen]
        for arm in self.arms:
            self.trial(arm, self.seeds[0])
        return found

    def trial(self, arm: str, seed: int) -> Trial:
        """One arm with one seed; what the user has given comes last and so holds for every arm.

        Raises ConfigError, which names the arm, and the run of it.
        """
        overrides = self._overrides(arm, seed)
        if (arm, seed) not in self._trials or self._trials[arm, seed].overrides != overrides:
            with naming(f"arm {arm}"):
                trial = Trial(arm, seed, self._composed(overrides), overrides)
                self._add_jobs(trial)
            self._trials[arm, seed] = trial
        return self._trials[arm, seed]

    def table(self) -> Table:
        """Of all finished runs of this configuration, whether this command has trained them or another."""
        runs = [run for run in read_runs(self.folder) if run.finished and run.arm in self.arms and self.choice(run.arm)]
        mine = [run for run in runs if self.trial(run.arm, run.seed).finished()]
        tuned = {arm: choice.shown() for arm, choice in self.won.items()}
        return replace(summarise(mine, self.columns, self.arms), tuned=tuned)

    def grids(self, arm: str) -> dict[str, list[Any] | Range]:
        """What an arm is tuned over: not a key that it, or the command line, sets itself."""
        said = {key_of(line) for line in [*self.arms[arm], *self.given]}
        grids = self.tune.grids if self.tune else {}
        return {key: values for key, values in grids.items() if key.removeprefix("/") not in said}

    def choice(self, arm: str) -> Choice | None:
        """The values that an arm is trained with; None: something is left to be tried."""
        if arm not in self.choices:
            choice = self._search(arm)[1]
            if choice is None:
                return None
            self.choices[arm] = choice
        return self.choices[arm]

    def attempts(self, arms: Collection[str]) -> list[Attempt]:
        """What these arms have to try next, of what is known by now. Raises ConfigError."""
        found = []
        for arm in arms:
            missing = [] if self.choice(arm) else self._search(arm)[0]
            tried = [self._attempt(arm, seed, values) for values in missing for seed in self._tuning_seeds]
            found += [attempt for attempt in tried if self._cost(attempt) is None]
        return found

    @property
    def won(self) -> dict[str, Choice]:
        """What arms have been tuned to, of which that is known by now and anything came to its end, in their order."""
        known = {arm: self.choices[arm] for arm in self.arms if arm in self.choices}
        return {arm: choice for arm, choice in known.items() if choice.values and choice.found}

    @property
    def tried(self) -> list[Attempt]:
        """All attempts that were looked at so far, finished or not."""
        return list(self._attempts.values())

    def contents(self) -> dict[str, Any]:
        """What the folder says of itself: arms with what they were tuned to, the table's columns, what was tried."""
        values = {arm: _lines(choice.values) for arm, choice in self.won.items()}
        arms = {arm: [*lines, *values.get(arm, ())] for arm, lines in self.arms.items()}
        tuned = {arm: choice.plain() for arm, choice in self.won.items()}
        return {"arms": arms, "table": self.columns, **({"tuned": tuned} if self.tune else {})}

    @property
    def _tuning_seeds(self) -> list[int]:
        return self.tune.seeds if self.tune else []

    def prunes(self, attempt: Attempt) -> bool:
        """Whether an attempt has been worse than most at a step, so that it is trained no further; remembers it.

        That follows from the curves alone: one that was seen too late, having come to its end, is pruned all the same.
        Of an attempt that is trained in its folder right now, or was. Raises OSError.
        """
        study = self._studies.get(attempt.arm)
        if study and self.tune and self.tune.prune and attempt.pruned is None:
            step = study.ends(attempt.curve(self.tune.by))
            if step is not None:
                attempt.note_pruned(step)
        return attempt.pruned is not None

    def left(self, arms: Collection[str]) -> int:
        """Attempts of these arms that Optuna has not heard of yet."""
        tries = self.tune.attempts * len(self._tuning_seeds) if self.tune else 0
        told = {arm: len(self._studies[arm].told) for arm in arms if arm in self._studies and arm not in self.choices}
        return sum(tries - known * len(self._tuning_seeds) for known in told.values())

    def _search(self, arm: str) -> tuple[list[Values], Choice | None]:
        grids = self.grids(arm)
        if not self.tune or not grids:
            return [], Choice({}, {})
        if self.tune.tuner == OPTUNA:
            return self._ask(arm, grids)
        lists = {key: values for key, values in grids.items() if not isinstance(values, Range)}

        def cost(values: Values) -> float | None:
            costs = [self._cost(self._attempt(arm, seed, values)) for seed in self._tuning_seeds]
            known = [one for one in costs if one is not None]
            return math.fsum(known) / len(known) if len(known) == len(costs) else None

        def possible(values: Values) -> bool:
            try:
                instantiate(self._attempt(arm, self._tuning_seeds[0], values).config["optimizer"], "optimizer")
            except ConfigError:
                return False
            return True

        return search(lists, cost, possible, self.tune.grow)

    def _ask(self, arm: str, space: Mapping[str, list[Any] | Range]) -> tuple[list[Values], Choice | None]:
        """What Optuna has tried next. Raises ConfigError where an end of a range cannot be trained."""
        from gsm.experiments import study

        assert self.tune is not None  # or nothing would be asked
        if arm not in self._studies:
            for end in (first, last):
                lines = _lines({key: end(values) for key, values in space.items()})
                with naming(f"arm {arm} with {', '.join(lines)}"):
                    config = self._composed(self._overrides(arm, self._tuning_seeds[0], lines))
                    instantiate(config["optimizer"], "optimizer")
        self._studies[arm] = study.Study(space, self._tuning_seeds[0])

        def outcome(values: Values) -> Outcome | None:
            key = (arm, label(values))
            if key not in self._outcomes and (known := self._outcome(arm, values)):
                self._outcomes[key] = known
            return self._outcomes.get(key)

        return study.search(self._studies[arm], outcome, self.tune.attempts, self.tune.at_once)

    def _outcome(self, arm: str, values: Values) -> Outcome | None:
        """What came of values, with all seeds; None: not all of them are finished."""
        from gsm.experiments.study import Outcome

        assert self.tune is not None  # or nothing was tried
        tried = [self._attempt(arm, seed, values) for seed in self._tuning_seeds]
        for attempt in tried:
            if attempt.finished():
                self.prunes(attempt)  # which a command that was killed has not noted
        costs = [cost for cost in map(self._cost, tried) if cost is not None]
        if len(costs) < len(tried):
            return None
        return Outcome(math.fsum(costs) / len(costs), tried[0].curve(self.tune.by) if self.tune.prune else {})

    def _cost(self, attempt: Attempt) -> float | None:
        """None for one that is not finished."""
        key = (attempt.arm, attempt.seed, label(attempt.values))
        if key not in self._costs and self.tune and attempt.finished():
            if attempt.diverged is None and attempt.pruned is None:
                attempt.conclude()  # which a command that was killed has not
            self._costs[key] = attempt.cost(self.tune.by)
        return self._costs.get(key)

    def _attempt(self, arm: str, seed: int, values: Values) -> Attempt:
        """Raises ConfigError, which names the arm and the values."""
        name = label(values)
        if (arm, seed, name) not in self._attempts:
            place = self.folder / TUNING / arm / name / f"seed{seed}"
            own = ("data.held_out=tuning", "ngrams=false", "sample=false", f"folder={quoted(place)}")
            overrides = (*self._overrides(arm, seed, _lines(values)), *own)
            with naming(f"arm {arm} with {', '.join(_lines(values))}"):
                if not any(known == arm for known, _, _ in self._attempts):
                    _require_tunable(self._composed(self._overrides(arm, seed, _lines(values))))
                attempt = Attempt(arm, seed, self._composed(overrides), overrides, values=values)
                self._add_jobs(attempt)
            self._attempts[arm, seed, name] = attempt
        return self._attempts[arm, seed, name]

    def _tuned(self, arm: str) -> tuple[str, ...]:
        """An arm's tuned values as overrides; till they are known, the first or lowest of what is tried."""
        if arm in self.choices:
            return _lines(self.choices[arm].values)
        return _lines({key: first(values) for key, values in self.grids(arm).items()})

    def _overrides(self, arm: str, seed: int, tuned: tuple[str, ...] | None = None) -> tuple[str, ...]:
        mine = [line for line in self.given if key_of(line) in ("experiment", "runs")]  # which arms may change
        theirs = [line for line in self.given if line not in mine and key_of(line).partition(".")[0] not in OWN]
        name = f"name={quoted(self.config['name'])}"  # which follows from what is given here
        theirs = [line for line in theirs if line != "resume=never"]  # which the parent obeys, once
        several = ["arms=null", "seeds=null", *(["tune=null"] if self.tune else [])]
        several += ["starter=null"] if self._has_starter else []  # an experiment's yaml may name it
        own = (*several, f"arm={arm}", f"seed={seed}", name)
        return (*mine, *own, *self.arms[arm], *(self._tuned(arm) if tuned is None else tuned), *theirs)

    def _add_jobs(self, trial: Trial) -> None:
        """One for every run of a trial, or that of another arm which trains the same."""
        config, asked = trial.config, trial.config["runs"]
        if asked is None:
            name, after = self._name(trial.folder), self._trained_in(config)
            command, log = (*self.script, *trial.overrides), trial.folder / "train.log"
            trial.jobs[""] = Training(name, command, log, after, starter=self._has_starter, config=config)
            return
        if str(config["resume"]) not in ("auto", "never"):
            raise ConfigError("resume=PATH is for a single run: runs.<name>=PATH takes the weights of a checkpoint")
        weights_of: dict[str | None, Path] = {}
        runs = parse_runs(asked)
        tries = isinstance(trial, Attempt)
        for run in _until(runs, self.tune.until if self.tune else None) if tries else runs:
            start, after = weights_of.get(run.after), trial.jobs.get(run.after or "")
            if run.given:
                weights_of[run.name] = checkpoint_file(run.given)
            elif run.measures and start:
                trial.jobs[run.name] = self._evaluation(trial.folder / run.name, run, start, after)
            else:
                trial.jobs[run.name] = self._training(trial, run, start, after)
                weights_of[run.name] = checkpoint_file(trial.jobs[run.name].folder)

    def _training(self, trial: Trial, run: Run, start: Path | None, after: Job | None) -> Training:
        """Where it is finished already, in this arm or another, or what is to be done for all arms that train alike."""
        own = trial.folder / run.name
        overrides = [*_without(trial.overrides, run.lines, start), "runs=null", *run.lines, f"folder={quoted(own)}"]
        overrides += [f"start_from={quoted(start)}"] if start else []
        overrides += ["data.held_out=tuning"] if isinstance(trial, Attempt) else []  # whatever data the run chooses
        with naming(f"run {run.name}"):
            config = self._composed(overrides)
        after = after or self._trained_in(config)
        command, log = (*self.script, *overrides), own / "train.log"
        job = Training(self._name(own), command, log, after, starter=self._has_starter, config=config)
        if after is None or after.finished():
            for place in [own, *sorted(self.folder.glob(f"*/seed{trial.seed}/{run.name}"))]:
                there = replace(job, name=self._name(place), config={**config, "folder": str(place)})
                if there.finished():
                    return there
        begins = after.name if after else str(weights.digest(config.get("start_from")))
        begins += " and its optimiser" if weights.is_branch(config) else ""
        return self._alike.setdefault((folder.identity({**config, "start_from": None}), begins), job)

    def _evaluation(self, place: Path, run: Run, start: Path, after: Job | None) -> Evaluation:
        chosen, _ = commands.choose(run.lines)
        prefix, output = "ruler." if chosen is Ruler else "", place if chosen.takes_folder else place / chosen.file
        words = [*run.lines, f"checkpoint={start}", f"{prefix}output={output}"]
        command, log = (sys.executable, *paths.script("evaluate"), *words), place / "evaluate.log"
        return Evaluation(self._name(place), command, log, after, folder=place, checkpoint=start, words=run.lines)

    def _trained_in(self, config: Mapping[str, Any]) -> Job | None:
        """The job, of an arm before, that trains what another one starts from."""
        if not config.get("start_from"):
            return None
        wanted, arms = checkpoint_file(config["start_from"]), [*self.arms]
        named = re.match(r"([^/]+)/seed(\d+)/", os.path.relpath(wanted, self.folder))
        if not named or named[1] not in arms[: arms.index(config["arm"])]:
            return None
        jobs = self.trial(named[1], int(named[2])).jobs.values()
        return next((job for job in jobs if isinstance(job, Training) and checkpoint_file(job.folder) == wanted), None)

    def _composed(self, overrides: Sequence[str]) -> dict[str, Any]:
        """A configuration that can be trained, and loaded from what it trains. Raises ConfigError.

        How many devices share a step, a starter decides: then each run checks that for itself.
        """
        config = compose(overrides)
        refuse_unnamed(config)
        if config.get("runs") is None and not self._has_starter:
            trainers.refuse_remainder(config)
        return config

    @property
    def _has_starter(self) -> bool:
        """Whether something else than this Python starts the runs, which are not told of it."""
        return bool(self.config.get("starter"))

    def _name(self, place: Path) -> str:
        return os.path.relpath(place, self.folder)


def _lines(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Values as overrides."""
    return tuple(f"{key.removeprefix('/')}={quoted(value)}" for key, value in values.items())


def _until(runs: Sequence[Run], last: str | None) -> list[Run]:
    """Those that train, or of these the one called ``last`` with all that it comes after."""
    wanted = {last}
    for run in reversed(runs):
        wanted |= {run.after} if run.name in wanted else set()
    return [run for run in runs if not run.measures and (last is None or run.name in wanted)]


def _require_tunable(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for data without a tuning split, and for an arm that starts from one that is not there yet."""
    if "held_out" not in config["data"]:
        raise ConfigError(
            f"tune needs data that can hold out a part of what is trained on, and {config['data'].get('_target_')} has "
            "no data.held_out (see docs/data.md): give it one, or leave tune out"
        )
    start = config.get("start_from")
    if start and not checkpoint_file(start).is_file():
        raise ConfigError(f"it starts from {start}, where there is no checkpoint yet: train that first, with arm=...")


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Puts in front of what is wrong where it is wrong."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def _without(overrides: Sequence[str], lines: Sequence[str], start: Path | None) -> list[str]:
    """The overrides of a trial that hold for a run with these lines: not what is said anew, nor what is said of a group
    that the run chooses itself."""
    groups = [key_of(line) for line in lines if is_group(key_of(line))]
    gone = tuple(f"{name}{mark}" for group in groups for name in (group, group.replace("/", ".")) for mark in "./")
    said = {"runs", "folder", *(["start_from"] if start else [])}
    keys = {line: key_of(line) for line in overrides}
    return [
        line
        for line, key in keys.items()
        if not (key.partition(".")[0] in said or key in groups or key.startswith(gone))
    ]
