"""Tuning: the values that each arm tries, on a part of its training data, before it trains with the best of them.

A grid tries every combination of its values. Optuna chooses values, also from ranges, and keeps each arm's study in a
journal. ``gsm.experiments.runs`` composes the attempts and reads their costs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from gsm import paths
from gsm.config.check import ConfigError, unknown
from gsm.config.compose import quoted
from gsm.experiments.entries import NOT_FOR_ARMS, check_overrides, flat_entries, parse_runs, read_seeds

NOT_FOR_TUNING = {*NOT_FOR_ARMS, "runs", "start_from", "start_fresh", "data.held_out"}
GRID, OPTUNA = "grid", "optuna"
OPTIONS: dict[str, Any] = {"tuner": GRID, "by": None, "seeds": 1, "run": None}  # entries beside keys, with defaults
FOR_OPTUNA: dict[str, Any] = {"attempts": 20, "at_once": 1}
# Known columns, and their better direction.
BETTER = {"bits_per_byte": "lowest", "val_loss": "lowest", "val_perplexity": "lowest", "accuracy": "highest"}
EDGE = " (edge)"  # suffix of a value in a table
STARTUP = 4  # attempts that Optuna draws at random
DIGITS = 3  # of a number from a range: it is typed on command lines, and names a folder
EXAMPLE = "{optimizer.learning_rate: [3e-3, 6e-3]}"
RANGE = "{low: 1e-3, high: 1e-2, log: true}"

Values = dict[str, Any]  # one value by key
Space = Mapping[str, Any]  # by key: a list of values, or a distribution of Optuna's


@dataclass(frozen=True)
class Tune:
    """The entry ``tune`` of a configuration.

    Attributes:
        space: by key, in the order of the yaml, a list of values, or a distribution of Optuna's for a range.
        by: keys of ``summary.json``, and ``lowest`` or ``highest``; the first key that a run has decides.
        seeds: the seeds that each combination is trained with.
        until: the last run that is trained, of several; None: all that train.
        tuner: ``grid`` or ``optuna``.
        attempts: combinations that Optuna chooses for an arm.
        at_once: combinations that Optuna chooses before it learns how the first of them ended.
    """

    space: dict[str, Any]
    by: dict[str, str]
    seeds: list[int]
    until: str | None = None
    tuner: str = GRID
    attempts: int = FOR_OPTUNA["attempts"]
    at_once: int = FOR_OPTUNA["at_once"]

    def decides(self) -> str:
        """Return the numbers that decide, in words."""
        return ", else ".join(f"{column} ({way})" for column, way in self.by.items())


@dataclass(frozen=True)
class Choice:
    """The best values of an arm.

    Attributes:
        values: by key; the first ones that were tried where every attempt has diverged.
        tried: all values that were tried, by key.
        diverged: combinations with an attempt that has diverged.
        found: whether an attempt came to its end.
    """

    values: Values
    tried: dict[str, list[Any]]
    diverged: list[Values] = field(default_factory=list)
    found: bool = True

    def at_edge(self, key: str) -> bool:
        """Return whether the value is the lowest or highest number that was tried: a better one may lie beyond."""
        numbers = self.tried[key]
        if len(numbers) < 2 or any(type(number) not in (int, float) for number in numbers):
            return False
        return self.values[key] in (min(numbers), max(numbers))

    def texts(self) -> dict[str, str]:
        """Return the values as cells of a table, with a mark at an edge."""
        return {key: f"{quoted(value)}{EDGE if self.at_edge(key) else ''}" for key, value in self.values.items()}


def search(tuner: Grid | Study, cost: Callable[[Values], float | None]) -> tuple[list[Values], Choice | None]:
    """Return the values that are still to be trained; if there are none, the best ones.

    Args:
        tuner: proposes values.
        cost: returns the cost of values: lower is better, infinite is diverged, None is not trained yet.
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
            lost = [values for values, one in zip(tuner.proposed, known, strict=True) if math.isinf(one)]
            return [], Choice(best, tried, _distinct(lost), math.isfinite(min(known)))


class Grid:
    """Proposes every combination of its lists of values at once."""

    def __init__(self, space: Space) -> None:
        self.proposed = [dict(zip(space, values, strict=True)) for values in product(*space.values())]

    def more(self, costs: Sequence[float]) -> bool:
        """Return False: there are no others."""
        return False


class Study:
    """Proposes values that Optuna chooses. Its journal lets an interrupted search go on.

    Each proposal has random numbers of its own, from the seed and its number, and follows from the costs of the rounds
    before. So an interruption changes none of them.

    Args:
        journal: the file.
        space: by key, a list of values, or a distribution.
        tune: the number of attempts, also at once.
        trains: identifies the training, so that another configuration has another study.

    Raises:
        ConfigError: the journal is damaged.
    """

    def __init__(self, journal: Path, space: Space, tune: Tune, trains: str) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space, self._tune = space, tune
        identity = json.dumps([{key: str(values) for key, values in space.items()}, tune.by, tune.seeds, trains])
        name = hashlib.sha256(identity.encode()).hexdigest()
        journal.parent.mkdir(parents=True, exist_ok=True)
        try:
            storage = JournalStorage(JournalFileBackend(str(journal)))
            self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            trials = [trial for trial in self._study.trials if trial.params.keys() == space.keys()]  # not cut off
            self.proposed = [self._values(trial.params) for trial in trials]
        except Exception as error:  # Optuna raises whatever a file that it has not written leads to
            raise ConfigError(
                f"{journal} is damaged ({type(error).__name__}). Delete it: finished attempts are not trained again"
            ) from error
        self._numbers = [trial.number for trial in trials]

    def more(self, costs: Sequence[float]) -> bool:
        """Record the costs and ask Optuna for the next round; an attempt that has diverged counts as the worst."""
        from optuna.distributions import BaseDistribution, CategoricalDistribution
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        for number, cost in zip(self._numbers, costs, strict=True):
            values, state = (cost, None) if math.isfinite(cost) else (None, TrialState.PRUNED)
            self._study.tell(number, values, state, skip_if_finished=True)
        done, tune = len(self.proposed), self._tune
        end = min(tune.attempts, done + tune.at_once - done % tune.at_once)
        kinds: dict[str, BaseDistribution] = {
            key: CategoricalDistribution([quoted(value) for value in values]) if isinstance(values, list) else values
            for key, values in self._space.items()
        }
        for number in range(done, end):
            seed = np.random.SeedSequence([tune.seeds[0], number]).generate_state(1)[0]
            self._study.sampler = TPESampler(seed=int(seed), n_startup_trials=STARTUP)
            trial = self._study.ask(kinds)
            self._numbers.append(trial.number)
            self.proposed.append(self._values(trial.params))
        return end > done

    def _values(self, params: Mapping[str, Any]) -> Values:
        return {key: _value(values, params[key]) for key, values in self._space.items()}


def _value(values: Any, param: Any) -> Any:
    """Return the value of a configuration that Optuna's parameter stands for."""
    if isinstance(values, list):
        return next(value for value in values if quoted(value) == param)
    return param if isinstance(param, int) else min(max(float(f"{param:.{DIGITS}g}"), values.low), values.high)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [value for number, value in enumerate(values) if value not in values[:number]]


def listed(space: Space) -> str:
    """Return a space in words."""
    words = {
        key: ", ".join(map(quoted, values)) if isinstance(values, list) else f"{values.low} to {values.high}"
        for key, values in space.items()
    }
    return "; ".join(f"{key}={values}" for key, values in words.items())


def lines(values: Values) -> tuple[str, ...]:
    """Return values as overrides."""
    return tuple(f"{key.removeprefix('/')}={quoted(value)}" for key, value in values.items())


def ends(space: Space) -> tuple[Values, Values]:
    """Return the first values of lists with the lowest of ranges, and the last values with the highest."""
    first = {key: values[0] if isinstance(values, list) else values.low for key, values in space.items()}
    return first, {key: values[-1] if isinstance(values, list) else values.high for key, values in space.items()}


def read_tune(tune: Any, columns: Sequence[str], runs: Any = None) -> Tune | None:
    """Return the entry ``tune`` of a configuration, checked; None: nothing is tuned. Raises ConfigError.

    Args:
        tune: of the configuration.
        columns: of the table; without ``by``, the first with a known direction decides.
        runs: of the configuration, for the names of those that train.
    """
    if tune is None:
        return None
    if not isinstance(tune, Mapping):
        raise ConfigError(f"tune={tune!r} is not allowed because it maps keys to values to try. Use {EXAMPLE}")
    entries = dict(tune)
    tuner, by, seeds, until = (entries.pop(key, usual) for key, usual in OPTIONS.items())
    if tuner not in (GRID, OPTUNA):
        raise unknown("tuner", str(tuner), [GRID, OPTUNA], "tune.tuner")
    if tuner == OPTUNA and find_spec("optuna") is None:
        raise ConfigError(f"tune.tuner=optuna needs the extra tune: {paths.install('tune')}")
    numbers = {key: entries.pop(key, usual) for key, usual in FOR_OPTUNA.items()} if tuner == OPTUNA else {}
    for key, number in numbers.items():
        if type(number) is not int or not 1 <= number <= 10_000:
            raise ConfigError(f"tune.{key}={number!r} is not allowed because it counts attempts. Use 1 to 10000")
    trained = [entry.name for entry in parse_runs(runs) if entry.trains] if runs is not None else []
    if until is not None and until not in trained:
        raise unknown("run", str(until), trained, "the runs that train")
    return Tune(_read_space(entries, tuner), _read_by(by, columns), read_seeds(seeds), until, tuner, **numbers)


def _read_space(entries: Mapping[str, Any], tuner: str) -> dict[str, Any]:
    """Return a list of values, or a distribution of Optuna's, by key. Raises ConfigError."""
    space: dict[str, Any] = {}
    for key, values in flat_entries("tune", entries).items():
        above, _, end = key.rpartition(".")
        if tuner == OPTUNA and end in ("low", "high", "log"):
            space.setdefault(above, {})[end] = values
        else:
            space[key] = values
    if not space:
        raise ConfigError(f"tune={dict(entries)} is not allowed because it has no key to try values of. Use {EXAMPLE}")
    for key, values in space.items():
        if isinstance(values, dict):
            space[key] = _read_range(key, values)
        elif not isinstance(values, list) or not values or len({repr(one) for one in values}) < len(values):
            ranged = f"a range {RANGE}" if tuner == OPTUNA else "tune.tuner=optuna for a range"
            raise ConfigError(
                f"tune.{key}={values!r} is not allowed because a list of different values is tried. Use {EXAMPLE}, "
                f"or {ranged}"
            )
        elif any(isinstance(one, Mapping) for one in values):
            raise ConfigError(f"tune.{key} has a mapping among its values. Use the keys in it, one by one")
    check_overrides("tune", lines(ends(space)[0]), NOT_FOR_TUNING)
    return space


def _read_range(key: str, entries: Mapping[str, Any]) -> Any:
    """Return a distribution of Optuna's: of integers where both ends are. Raises ConfigError."""
    from optuna.distributions import FloatDistribution, IntDistribution

    numbers: list[Any] = [entries.get("low"), entries.get("high")]
    log = entries.get("log", False)
    try:
        if any(type(number) not in (int, float) or not math.isfinite(number) for number in numbers):
            raise ValueError("low and high are two numbers")
        if not isinstance(log, bool):
            raise ValueError("log is true or false")
        kind = IntDistribution if all(isinstance(number, int) for number in numbers) else FloatDistribution
        return kind(*numbers, log=log)
    except ValueError as error:
        raise ConfigError(f"tune.{key}={dict(entries)} is not allowed because {error}. Use {RANGE}") from error


def _read_by(by: Any, columns: Sequence[str]) -> dict[str, str]:
    """Return the keys that decide, and their better direction. Raises ConfigError."""
    if by is None or isinstance(by, str):
        asked = [column for column in columns if "/" not in column] if by is None else [by]
        ways = {column: BETTER[word] for column in asked if (word := column.rpartition(".")[2]) in BETTER}
        if not ways:
            raise ConfigError(
                f"tune.by={by or 'null'} is not allowed because no better direction is known of "
                f"{', '.join(asked)}. Use tune.by={{accuracy: highest}}"
            )
        return ways
    if not isinstance(by, Mapping) or len(by) != 1 or set(by.values()) - {"lowest", "highest"}:
        raise ConfigError(
            f"tune.by={by!r} is not allowed because it maps a key of summary.json to its way. Use {{accuracy: highest}}"
        )
    ((column, way),) = by.items()
    if "/" in column:
        raise ConfigError(
            f"tune.by={column} is not allowed because evaluations measure it on reported data. Use a number of training"
        )
    return {str(column): way}
