"""Tuning: the values that each arm tries, on a part of its training data, before it trains with the best of them.

An attempt is a trial of the arm with further overrides: its values, the tuning split, and a folder in ``tuning``.
Every combination of the values is tried. The best values become overrides of the arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from gsm.config.address import TUNING
from gsm.config.check import ConfigError, unknown
from gsm.config.compose import quoted
from gsm.config.naming import label
from gsm.experiments.entries import (
    NOT_FOR_ARMS,
    Entry,
    check_overrides,
    flat_entries,
    key_of,
    naming,
    parse_runs,
    read_keys,
)
from gsm.experiments.runs import Experiment, Run, Trial
from gsm.experiments.table import COLUMNS, RunSummary
from gsm.files import read_json
from gsm.tables import filled

HELD_OUT = "data.held_out=tuning"  # the split that no table reports
NOT_FOR_TUNING = {*NOT_FOR_ARMS, "runs", "start_from", "start_fresh", "data.held_out"}
OPTIONS: dict[str, Any] = {"by": None, "seeds": 1, "run": None}  # entries beside keys, with defaults
# Known columns, and their better direction.
BETTER = {"bits_per_byte": "lowest", "val_loss": "lowest", "val_perplexity": "lowest", "accuracy": "highest"}
EDGE = " (edge)"  # suffix of a value in a table
EXAMPLE = "{optimizer.learning_rate: [3e-3, 6e-3]}"

Values = dict[str, Any]  # one value by key
Space = Mapping[str, list[Any]]  # the values to try, by key


@dataclass(frozen=True)
class Tune:
    """The entry ``tune`` of a configuration. Without keys in its space nothing is tuned.

    Attributes:
        space: the values to try, by key in the order of the yaml.
        by: keys of ``summary.json``, and ``lowest`` or ``highest``; the first key that a run has decides.
        seeds: the seeds that each combination is trained with.
        until: the last run that is trained, of several; None: all that train.
    """

    space: dict[str, list[Any]]
    by: dict[str, str]
    seeds: list[int]
    until: str | None = None

    def decides(self) -> str:
        """Return the numbers that decide, in words."""
        return ", else ".join(f"{column} ({way})" for column, way in self.by.items())

    def entries(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries of ``runs`` that an attempt trains, on the tuning split of the data that each chooses."""
        wanted = {self.until}
        for entry in reversed(entries):
            wanted |= {entry.after} if entry.name in wanted else set()
        return [
            replace(entry, lines=(*entry.lines, HELD_OUT)) if entry.trains else entry
            for entry in entries
            if not entry.measures and (self.until is None or entry.name in wanted)
        ]


@dataclass(frozen=True)
class Choice:
    """The best values of an arm.

    Attributes:
        values: by key; if every attempt has diverged, the first ones that were tried.
        tried: all values that were tried, by key.
        diverged: combinations with an attempt that has diverged.
        finite: whether an attempt came to its end.
    """

    values: Values
    tried: dict[str, list[Any]]
    diverged: list[Values] = field(default_factory=list)
    finite: bool = True

    def at_edge(self, key: str) -> bool:
        """Return whether the value is the lowest or highest number that was tried: a better one may lie beyond."""
        numbers = self.tried[key]
        if len(numbers) < 2 or any(type(number) not in (int, float) for number in numbers):
            return False
        return self.values[key] in (min(numbers), max(numbers))

    def texts(self) -> dict[str, str]:
        """Return the values as cells of a table, with a mark at an edge."""
        return {key: f"{quoted(value)}{EDGE if self.at_edge(key) else ''}" for key, value in self.values.items()}


class Tuning:
    """The searches of an experiment's arms; none with ``tune=null``.

    Raises ConfigError for a wrong entry ``tune``, a value that cannot be trained, or an arm without a tuning split.
    """

    def __init__(self, experiment: Experiment) -> None:
        config = experiment.config
        self.experiment = experiment
        self.tune = read_tune(experiment.tune, config["table"] or COLUMNS, config["runs"])
        self.searches: dict[str, Search] = {}  # by arm
        for arm, overrides in experiment.arms.items():
            fixed = {key_of(line) for line in [*overrides, *experiment.given]}
            space = {key: values for key, values in self.tune.space.items() if key.removeprefix("/") not in fixed}
            if space:
                self.searches[arm] = Search(experiment, arm, self.tune, space)
        self.chosen = [self.searches[arm] for arm in experiment.chosen if arm in self.searches]
        for search in self.chosen:
            search.check()

    def grid(self) -> list[Trial]:
        """Return all attempts of the chosen arms' grids, tried or not."""
        return [attempt for search in self.chosen for attempt in search.grid()]

    def attempts(self) -> list[Trial]:
        """Return the attempts that the chosen arms have to train next."""
        return [attempt for search in self.chosen for attempt in search.missing()]

    def train(self, work: Callable[[list[Trial]], dict[str, list[str]]]) -> dict[str, list[str]]:
        """Train the attempts of every chosen arm that have not ended.

        Args:
            work: trains attempts, and returns the error lines of failed runs by their names.

        Returns:
            the error lines of the arms without a best value, by arm.
        """
        failed: dict[str, list[str]] = {}
        if attempts := self.attempts():
            arms = ", ".join(dict.fromkeys(attempt.arm for attempt in attempts))
            tried = f"{listed(self.space)}; {len(attempts)} attempt{'s' if len(attempts) > 1 else ''} now"
            sentence = f"tuning {arms} on a part of the training data, by {self.tune.decides()}: {tried}"
            print(filled([sentence]), flush=True)
            errors = work(attempts)
            for attempt in attempts:
                cost = self.searches[attempt.arm].cost(attempt)
                if cost == math.inf:
                    print(f"{attempt.config['label']} has diverged, which counts as the worst", flush=True)
                elif cost is None:
                    words = [line for run in attempt.runs.values() for line in errors.get(run.label, [])]
                    failed[attempt.arm] = [*failed.get(attempt.arm, []), *words]
        for search in self.chosen:
            if (choice := search.choice()) and not choice.finite:
                failed[search.arm] = [f"{search.arm}: every value that was tried has diverged: {listed(choice.tried)}"]
        return failed

    def settled(self) -> Experiment:
        """Return the experiment of the arms that need no values or have their best ones, as overrides. An arm that an
        earlier command has tuned is one of them."""
        best, arms = self._best(), self.experiment.arms
        values = {arm: lines(best[arm].values) if arm in best else () for arm in arms}
        ready = [arm for arm in arms if arm in best or arm not in self.searches]
        return self.experiment.with_arms({arm: [*arms[arm], *values[arm]] for arm in ready})

    def texts(self) -> dict[str, dict[str, str]]:
        """Return the best values as cells of a table, by arm."""
        return {arm: choice.texts() for arm, choice in self._best().items()}

    def contents(self) -> dict[str, Any]:
        """Return the part of an experiment's description that has its tuned values."""
        tuned = {arm: {key: {"shown": text} for key, text in texts.items()} for arm, texts in self.texts().items()}
        return {"tuned": tuned} if self.tune.space else {}

    def header(self) -> list[str]:
        """Return a sentence on the best values of the chosen arms; empty without any."""
        texts = {arm: values for arm, values in self.texts().items() if arm in self.experiment.chosen}
        words = [f"{arm} {', '.join(map('='.join, values.items()))}" for arm, values in texts.items()]
        return [f"tuned: {'; '.join(words)}"] if words else []

    def notes(self) -> list[str]:
        """Return sentences on how values were chosen, and on those that have diverged."""
        if not self.searches:
            return []
        arms = "" if len(self.searches) == len(self.experiment.arms) else f"{', '.join(self.searches)}: "
        seeds = f"{'seeds' if len(self.tune.seeds) > 1 else 'seed'} {', '.join(map(str, self.tune.seeds))}"
        how = (
            f"{arms}tuned on a part of the training data that no number above uses, by {self.tune.decides()}, {seeds}: "
            f"the best of {listed(self.space)}; '{EDGE.strip()}' marks the end of the values tried"
        )
        choices = self._choices().items()
        lost = [f"{arm} {', '.join(lines(values))}" for arm, choice in choices for values in choice.diverged]
        return [how, *([f"diverged, and counted as the worst: {'; '.join(lost)}"] if lost else [])]

    @property
    def space(self) -> Space:
        """The values that an arm tries, by key: without a key that all arms or the command line set."""
        return {key: values for search in self.searches.values() for key, values in search.space.items()}

    def _choices(self) -> dict[str, Choice]:
        """Return the best values of the chosen arms, and of those that an earlier command has tuned."""
        earlier = (self.experiment.folder / TUNING).is_dir()
        searches = [search for search in self.searches.values() if earlier or search in self.chosen]
        return {search.arm: choice for search in searches if (choice := search.choice())}

    def _best(self) -> dict[str, Choice]:
        return {arm: choice for arm, choice in self._choices().items() if choice.finite}


class Search:
    """The attempts of one arm, and its best values.

    Attributes:
        space: the values that the arm tries, without the keys that it or the command line sets.
    """

    def __init__(self, experiment: Experiment, arm: str, tune: Tune, space: Space) -> None:
        self.experiment, self.arm, self.tune, self.space = experiment, arm, tune, space
        self._choice: Choice | None = None
        self._costs: dict[Trial, float] = {}

    def grid(self) -> list[Trial]:
        """Return the attempts of every combination of values."""
        return [attempt for values in combinations(self.space) for attempt in self._attempts(values)]

    def missing(self) -> list[Trial]:
        """Return the attempts to train."""
        return [] if self._choice else [attempt for attempt in self.grid() if self.cost(attempt) is None]

    def choice(self) -> Choice | None:
        """Return the best values; None until all attempts have ended."""
        if not self._choice and not self.missing():
            self._choice = choose(self.space, self._mean)
        return self._choice

    def cost(self, attempt: Trial) -> float | None:
        """Return the number that decides, lower is better; infinite if it has diverged, None if it is not finished.

        Raises ConfigError where its summary has no such number.
        """
        if attempt not in self._costs:
            if any(map(_diverged, attempt.runs.values())):
                self._costs[attempt] = math.inf
            elif attempt.finished():
                self._costs[attempt] = _cost(attempt.summary(), self.tune.by)
        return self._costs.get(attempt)

    def check(self) -> None:
        """Raise ConfigError where the arm cannot be tuned: no tuning split, or a value that cannot be trained."""
        config = self.experiment.trial(self.arm, self.experiment.seeds[0]).config
        if "held_out" not in config["data"]:
            raise ConfigError(
                f"arm {self.arm}: tune must be null, as {config['data'].get('_target_')} has no data.held_out"
            )
        self.grid()

    def _attempts(self, values: Values) -> list[Trial]:
        """Return the attempts with these values, one for each seed."""
        attempts = []
        for seed in self.tune.seeds:
            overrides = self.experiment.overrides(self.arm, seed, lines(values))
            words = "-".join([self.arm, *(label(key, value) for key, value in values.items()), f"seed{seed}"])
            place = (f"logs={quoted(self.experiment.folder)}", f"name={TUNING}", f"label={words}")
            overrides += (HELD_OUT, "ngrams=false", "sample=false", *place)
            with naming(f"arm {self.arm} with {', '.join(lines(values))}"):
                attempts.append(self.experiment.build(self.arm, seed, overrides, self.tune.entries))
        return attempts

    def _mean(self, values: Values) -> float:
        """Return the mean cost of the attempts with these values, all of which have ended."""
        costs = [self._costs[attempt] for attempt in self._attempts(values)]
        return math.fsum(costs) / len(costs)


def _diverged(run: Run) -> bool:
    """Return whether a run has ended with a loss or a gradient that is not finite."""
    summary = read_json(run.find_folder() / "summary.json") or {}
    return summary.get("status") == "failed" and str(summary.get("reason")).startswith(FloatingPointError.__name__)


def _cost(summary: RunSummary, by: Mapping[str, str]) -> float:
    for column, way in by.items():
        value = summary.number(column)
        if value is not None:
            return math.inf if not math.isfinite(value) else -value if way == "highest" else value
    raise ConfigError(f"tune.by must be a number of {summary.folder}/summary.json, got {' or '.join(by)}")


def combinations(space: Space) -> list[Values]:
    """Return every combination of the values."""
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def choose(space: Space, cost: Callable[[Values], float]) -> Choice:
    """Return the best of all combinations, the first of equal ones.

    Args:
        space: the values that were tried.
        cost: returns the cost of a combination: lower is better, infinite is diverged.
    """
    tried = combinations(space)
    costs = [cost(values) for values in tried]
    diverged = [values for values, one in zip(tried, costs, strict=True) if math.isinf(one)]
    return Choice(tried[costs.index(min(costs))], dict(space), diverged, math.isfinite(min(costs)))


def listed(space: Space) -> str:
    """Return a space in words."""
    return "; ".join(f"{key}={', '.join(map(quoted, values))}" for key, values in space.items())


def lines(values: Values) -> tuple[str, ...]:
    """Return values as overrides."""
    return tuple(f"{key.removeprefix('/')}={quoted(value)}" for key, value in values.items())


def read_tune(tune: Mapping[str, Any], columns: Sequence[str], runs: Any = None) -> Tune:
    """Return the entry ``tune`` of a configuration, checked; an empty one has no keys to try. Raises ConfigError.

    Args:
        tune: of the configuration.
        columns: of the table; without ``by``, the first with a known direction decides.
        runs: of the configuration, for the names of those that train.
    """
    if not tune:
        return Tune({}, {}, [])
    entries = dict(tune)
    by, seeds, until = (entries.pop(key, usual) for key, usual in OPTIONS.items())
    trained = [entry.name for entry in parse_runs(runs) if entry.trains] if runs is not None else []
    if until is not None and until not in trained:
        raise unknown("run", str(until), trained, "the runs that train")
    seeds = read_keys({"seeds": seeds}, "tune.").seeds or []
    return Tune(_read_space(entries), _read_by(by, columns), seeds, until)


def _read_space(entries: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values to try, by key. Raises ConfigError."""
    space = flat_entries("tune", entries)
    if not space:
        raise ConfigError(f"tune must have a key to try values of, as {EXAMPLE}, got {dict(entries)}")
    for key, values in space.items():
        if not isinstance(values, list) or not values or len({repr(one) for one in values}) < len(values):
            raise ConfigError(f"tune.{key} must be a list of different values, got {values!r}")
        if any(isinstance(one, Mapping) for one in values):
            raise ConfigError(f"tune.{key} must have values without keys of their own, got {values!r}")
    check_overrides("tune", lines(combinations(space)[0]), NOT_FOR_TUNING)
    return space


def _read_by(by: Any, columns: Sequence[str]) -> dict[str, str]:
    """Return the keys that decide, and their better direction. Raises ConfigError."""
    if by is None or isinstance(by, str):
        candidates = [column for column in columns if "/" not in column] if by is None else [by]
        ways = {column: BETTER[word] for column in candidates if (word := column.rpartition(".")[2]) in BETTER}
        if not ways:
            raise ConfigError(f"tune.by must say what is better, as {{accuracy: highest}}, got {', '.join(candidates)}")
        return ways
    if not isinstance(by, Mapping) or len(by) != 1 or set(by.values()) - {"lowest", "highest"}:
        raise ConfigError(f"tune.by must map a key of summary.json, as {{accuracy: highest}}, got {by!r}")
    ((column, way),) = by.items()
    if "/" in column:
        raise ConfigError(f"tune.by must be a number of training, got {column}, which is measured on reported data")
    return {str(column): way}
