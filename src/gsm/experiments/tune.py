"""Tuning: the values that each arm tries, on a part of its training data, before it trains with the best of them.

A grid tries every combination of its values. Optuna chooses values, also from ranges; the study of each arm lies in a
journal in the experiment's folder. ``gsm.experiments.runs`` composes the attempts and reads their costs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gsm import paths
from gsm.config.check import ConfigError, unknown
from gsm.config.compose import quoted
from gsm.experiments.entries import NOT_FOR_ARMS, check_overrides, flat_entries, parse_runs, read_seeds

if TYPE_CHECKING:  # an extra: imported where a study is opened
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

NOT_FOR_TUNING = {*NOT_FOR_ARMS, "runs", "start_from", "start_fresh", "data.held_out"}
GRID, OPTUNA = "grid", "optuna"
FOR_OPTUNA: dict[str, Any] = {"attempts": 20, "at_once": 1}  # entries for Optuna alone, with their defaults
# Known columns: is a higher value better?
BETTER = {"bits_per_byte": False, "val_loss": False, "val_perplexity": False, "accuracy": True}
WAYS = {"lowest": False, "highest": True}
EDGE = " (edge)"  # suffix of a value in a table
STARTUP = 4  # attempts that Optuna draws at random
DIGITS = 3  # of a number from a range: it is typed on command lines, and names a folder
JOURNAL = "optuna.jsonl"

Values = dict[str, Any]  # one value by key


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, integers where both are; uniform in their logarithm if ``log``."""

    low: int | float
    high: int | float
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{' (log)' if self.log else ''}"


@dataclass(frozen=True)
class Tune:
    """The entry ``tune`` of a configuration.

    Attributes:
        space: a list of values, or a range for Optuna, by key, in the order of the yaml.
        by: keys of ``summary.json``, and whether higher is better; the first that a run has decides.
        seeds: the seeds that each combination is trained with.
        until: the last run that is trained, of several; None: all that train.
        tuner: ``grid`` or ``optuna``.
        attempts: combinations that Optuna chooses for an arm.
        at_once: combinations that Optuna chooses before it learns how the first of them ended.
    """

    space: dict[str, list[Any] | Range]
    by: dict[str, bool]
    seeds: list[int]
    until: str | None = None
    tuner: str = GRID
    attempts: int = FOR_OPTUNA["attempts"]
    at_once: int = FOR_OPTUNA["at_once"]

    def decides(self) -> str:
        """Return the numbers that decide, in words."""
        return ", else ".join(f"{column} ({'highest' if more else 'lowest'})" for column, more in self.by.items())


@dataclass(frozen=True)
class Choice:
    """The best values of an arm.

    Attributes:
        values: by key.
        tried: all values that were tried, by key.
        cost: the mean over the seeds, lower is better; infinite where every attempt has diverged.
    """

    values: Values
    tried: dict[str, list[Any]]
    cost: float = 0.0

    @property
    def found(self) -> bool:
        """Whether an attempt came to its end."""
        return math.isfinite(self.cost)

    def at_edge(self, key: str) -> bool:
        """Return whether the value is the lowest or highest number that was tried: a better one may lie beyond."""
        numbers = self.tried[key]
        if len(numbers) < 2 or any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
            return False
        return self.values[key] in (min(numbers), max(numbers))

    def shown(self) -> dict[str, str]:
        """Return the values as cells of a table, with a mark at an edge."""
        return {key: f"{quoted(value)}{EDGE if self.at_edge(key) else ''}" for key, value in self.values.items()}

    def plain(self) -> dict[str, Any]:
        """Return the same for JSON."""
        return {
            key: {"value": self.values[key], "edge": self.at_edge(key), "tried": self.tried[key], "shown": shown}
            for key, shown in self.shown().items()
        }


def search(tuner: Grid | Study, cost: Callable[[Values], float | None]) -> tuple[list[Values], Choice | None]:
    """Return the values that are still to be trained; if there are none, the best ones.

    Args:
        tuner: proposes values.
        cost: of values, lower is better; None: they are not trained yet.
    """
    while True:
        costs = [cost(values) for values in tuner.proposed]
        missing = [values for values, known in zip(tuner.proposed, costs, strict=True) if known is None]
        if missing:
            return _distinct(missing), None
        known = [one for one in costs if one is not None]
        if not tuner.more(known):
            best = tuner.proposed[known.index(min(known))]
            tried = {key: _distinct([values[key] for values in tuner.proposed]) for key in best}
            return [], Choice(best, tried, min(known))


class Grid:
    """Proposes every combination of its lists of values at once."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self.proposed = [dict(zip(space, values, strict=True)) for values in product(*space.values())]

    def more(self, costs: Sequence[float]) -> bool:
        """Return False: there are no others."""
        return False


class Study:
    """Proposes values that Optuna chooses. The study lies in a journal, so that an interrupted search goes on.

    Each proposal has random numbers of its own, from the seed and its number, and follows from the costs of the rounds
    before. So an interruption changes none of them.

    Args:
        journal: the file.
        space: a list of values, or a range, by key.
        tune: how many attempts, and how many at once.
        trains: identifies what is trained with the values, so that another configuration has another study.

    Raises:
        ConfigError: the journal is damaged.
    """

    def __init__(self, journal: Path, space: Mapping[str, Sequence[Any] | Range], tune: Tune, trains: str) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.tune = dict(space), tune
        kinds = {key: str(values) if isinstance(values, Range) else values for key, values in space.items()}
        identity = json.dumps([kinds, tune.by, tune.seeds, trains], default=str)
        name = hashlib.sha256(identity.encode()).hexdigest()
        journal.parent.mkdir(parents=True, exist_ok=True)
        try:
            storage = JournalStorage(JournalFileBackend(str(journal)))
            self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            trials = [one for one in self._study.trials if one.params.keys() == self.space.keys()]  # not cut off
            self.proposed = [self._values(trial) for trial in trials]
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError, StopIteration) as error:
            raise ConfigError(
                f"{journal} is damaged ({type(error).__name__}). Delete it: finished attempts are not trained again"
            ) from error
        self._numbers = [trial.number for trial in trials]
        self._told = {trial.number for trial in trials if trial.state.is_finished()}

    def more(self, costs: Sequence[float]) -> bool:
        """Record the costs and ask Optuna for the next round; an attempt that has diverged counts as the worst."""
        from optuna.trial import TrialState

        for number, cost in zip(self._numbers, costs, strict=True):
            if number not in self._told:
                finite = math.isfinite(cost)
                self._study.tell(number, cost if finite else None, None if finite else TrialState.PRUNED)
                self._told.add(number)
        before = len(self.proposed)
        while len(self.proposed) < self.tune.attempts:
            self._propose()
            if len(self.proposed) % self.tune.at_once == 0:
                break
        return len(self.proposed) > before

    def _propose(self) -> None:
        from optuna.samplers import TPESampler

        seed = np.random.SeedSequence([self.tune.seeds[0], len(self.proposed)]).generate_state(1)[0]
        self._study.sampler = TPESampler(seed=int(seed), n_startup_trials=STARTUP)
        trial = self._study.ask({key: _distribution(values) for key, values in self.space.items()})
        self._numbers.append(trial.number)
        self.proposed.append(self._values(trial))

    def _values(self, trial: FrozenTrial | Trial) -> Values:
        return {key: _value(values, trial.params[key]) for key, values in self.space.items()}


def _distribution(values: Sequence[Any] | Range) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution([quoted(one) for one in values])
    kind = IntDistribution if isinstance(values.low, int) and isinstance(values.high, int) else FloatDistribution
    return kind(values.low, values.high, log=values.log)  # pyright: ignore[reportArgumentType]


def _value(values: Sequence[Any] | Range, param: Any) -> Any:
    """Return the value of a configuration that Optuna's parameter stands for."""
    if not isinstance(values, Range):
        return next(one for one in values if quoted(one) == param)
    return param if isinstance(param, int) else min(max(float(f"{param:.{DIGITS}g}"), values.low), values.high)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [one for number, one in enumerate(values) if one not in values[:number]]


def listed(space: Mapping[str, Sequence[Any] | Range]) -> str:
    """Return a space in words."""
    words = {
        key: str(values) if isinstance(values, Range) else ", ".join(map(quoted, values))
        for key, values in space.items()
    }
    return "; ".join(f"{key}={values}" for key, values in words.items())


def lines(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values as overrides."""
    return tuple(f"{key.removeprefix('/')}={quoted(value)}" for key, value in values.items())


def low(values: Sequence[Any] | Range) -> Any:
    """Return the first value of a list, or the lowest of a range."""
    return values.low if isinstance(values, Range) else values[0]


def high(values: Sequence[Any] | Range) -> Any:
    """Return the last value of a list, or the highest of a range."""
    return values.high if isinstance(values, Range) else values[-1]


def read_tune(tune: Any, columns: Sequence[str], runs: Any = None) -> Tune | None:
    """Return the entry ``tune`` of a configuration, checked; None: nothing is tuned. Raises ConfigError.

    Args:
        tune: of the configuration.
        columns: of the table; without ``by``, the first that is known to be better one way decides.
        runs: of the configuration, for the names of those that train.
    """
    if tune is None:
        return None
    if not isinstance(tune, Mapping):
        raise ConfigError(
            f"tune is {tune!r}, but maps keys to values to try: {{optimizer.learning_rate: [3e-3, 6e-3]}}"
        )
    entries = dict(tune)
    tuner = _read_tuner(entries)
    numbers = {key: entries.pop(key, usual) for key, usual in FOR_OPTUNA.items()}
    by, seeds, until = (entries.pop(key, usual) for key, usual in (("by", None), ("seeds", 1), ("run", None)))
    space = _read_space(entries, tuner)
    trained = [entry.name for entry in parse_runs(runs) if entry.trains] if runs is not None else []
    if until is not None and until not in trained:
        raise unknown("run", str(until), trained, "the runs that train")
    for key, number in numbers.items():
        if type(number) is not int or not 1 <= number <= 10_000:
            raise ConfigError(f"tune.{key} is {number!r}, but has to be a number of attempts, from 1 to 10000")
    return Tune(space, _read_by(by, columns), read_seeds(seeds), until, tuner, **numbers)


def _read_tuner(entries: dict[str, Any]) -> str:
    """Remove the tuner from the entries of ``tune`` and return it. Raises ConfigError."""
    tuner = entries.pop("tuner", GRID)
    if tuner not in (GRID, OPTUNA):
        raise unknown("tuner", str(tuner), [GRID, OPTUNA], "tune.tuner")
    foreign = [key for key in FOR_OPTUNA if key in entries and tuner == GRID]
    if foreign:
        raise ConfigError(
            f"tune.{foreign[0]}={entries[foreign[0]]} is not allowed because tune.tuner is grid. Use "
            "tune.tuner=optuna, or leave it out"
        )
    for key, instead in {"grow": "a wider list of values", "prune": "fewer attempts"}.items():
        if key in entries:
            raise ConfigError(f"tune.{key}={entries[key]} is not allowed because it was withdrawn. Use {instead}")
    if tuner == OPTUNA and find_spec("optuna") is None:
        raise ConfigError(f"tune.tuner=optuna needs the extra tune: {paths.install('tune')}")
    return tuner


def _read_space(entries: Mapping[str, Any], tuner: str) -> dict[str, list[Any] | Range]:
    """Return the values by key. Raises ConfigError."""
    space = _read_ranges(flat_entries("tune", entries))
    if not space:
        raise ConfigError("tune names no key to try values of: {optimizer.learning_rate: [3e-3, 6e-3]} does")
    for key, values in space.items():
        if isinstance(values, Range):
            if tuner != OPTUNA:
                raise ConfigError(
                    f"tune.{key} is a range, {values}, of which a grid tries nothing: list values, or say "
                    "tune.tuner=optuna"
                )
        elif not isinstance(values, list) or not values or len({repr(one) for one in values}) < len(values):
            ranged = ", or a range {low: 1e-3, high: 1e-2, log: true}" if tuner == OPTUNA else ""
            raise ConfigError(f"tune.{key} is {values!r}, but takes a list of different values to try{ranged}")
        elif any(isinstance(one, Mapping) for one in values):
            raise ConfigError(f"tune.{key} has a mapping among its values: name the keys in it one by one")
        check_overrides("tune", lines({key: low(values)}), NOT_FOR_TUNING)
    return space


def _read_ranges(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key, with a Range for the entries ``low``, ``high`` and ``log`` below one key."""
    ranged = dict.fromkeys(key.rpartition(".")[0] for key in entries if key.rpartition(".")[2] in ("low", "high"))
    space: dict[str, Any] = {}
    for key, values in entries.items():
        above = next((one for one in ranged if key.startswith(f"{one}.")), None)
        if above is None:
            space[key] = values
        elif above not in space:
            space[above] = _read_range(
                above, {name[len(above) + 1 :]: one for name, one in entries.items() if name.startswith(f"{above}.")}
            )
    return space


def _read_range(key: str, ends: Mapping[str, Any]) -> Range:
    for name in ends:
        if name not in ("low", "high", "log"):
            raise unknown("entry", name, ["low", "high", "log"], f"tune.{key}")
    for name in ("low", "high"):
        value = ends.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"tune.{key}.{name} is {value!r}, but a range takes two numbers: {{low: 1, high: 8}}")
    lowest, highest, log = ends["low"], ends["high"], ends.get("log", False)
    if lowest >= highest:
        raise ConfigError(f"tune.{key} goes from low {lowest} to high {highest}: give low the smaller number")
    if not isinstance(log, bool):
        raise ConfigError(f"tune.{key}.log is {log!r}, but has to be true or false")
    if log and lowest <= 0:
        raise ConfigError(f"tune.{key}.low is {lowest}, which has no logarithm: give low above 0, or leave log out")
    return Range(lowest, highest, log)


def _read_by(by: Any, columns: Sequence[str]) -> dict[str, bool]:
    """Return the keys that decide, and whether higher is better. Raises ConfigError."""
    if by is None:
        ways = {column: _higher_is_better(column) for column in columns if "/" not in column}
        known = {column: higher for column, higher in ways.items() if higher is not None}
        if not known:
            raise ConfigError(
                f"tune does not say which number decides, and of the table's ({', '.join(columns)}) none is known to "
                "be better where it is lower or where it is higher: say tune.by={accuracy: highest}"
            )
        return known
    if isinstance(by, str) and _higher_is_better(by) is not None:
        by = {by: "highest" if _higher_is_better(by) else "lowest"}
    if not isinstance(by, Mapping) or len(by) != 1 or set(by.values()) - set(WAYS):
        raise ConfigError(
            f"tune.by is {by!r}, but takes a key of summary.json with its way: {{accuracy: highest}}, or lowest"
        )
    ((column, way),) = by.items()
    if "/" in column:
        raise ConfigError(
            f"tune.by is {column}, which evaluations measure on what is reported: name a number of training"
        )
    return {str(column): WAYS[way]}


def _higher_is_better(column: str) -> bool | None:
    """Return whether higher is better, by the last word of a column; None: unknown."""
    return BETTER.get(column.rpartition(".")[2])
