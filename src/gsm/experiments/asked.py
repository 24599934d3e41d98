"""What a configuration says of an experiment's arms, seeds, runs, table and tuning, read and checked."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from gsm import paths
from gsm.config.check import ConfigError, flat, unknown
from gsm.evaluation import commands
from gsm.experiments.compare import CONTENTS
from gsm.experiments.table import COLUMNS
from gsm.files import read_json
from gsm.training.callbacks.summary import VALIDATION

# The parent's; a job gets its own.
OWN = {"name", "arm", "arms", "seed", "seeds", "tune", "jobs", "starter", "force", "table"}
NOT_FOR_ARMS = {*OWN, "logs", "folder", "experiment", "resume"}
NOT_FOR_RUNS = {*NOT_FOR_ARMS, "runs", "start_from"}
AFTER, EVALUATE = "after", "evaluate"  # of a run's keys, those that are no overrides
TOLD = ("checkpoint", "output")  # of evaluate.py's arguments, those that its job says
NOT_FOR_TUNING = {*NOT_FOR_ARMS, "runs", "start_from", "start_fresh", "data.held_out"}
BY, GROW, UNTIL = "by", "grow", "run"  # of tune's entries, those that are no keys to try values of; and seeds
TUNER, ATTEMPTS, AT_ONCE, PRUNE = "tuner", "attempts", "at_once", "prune"  # as are these
GRID, OPTUNA = "grid", "optuna"
FOR_OPTUNA: dict[str, Any] = {ATTEMPTS: 20, AT_ONCE: 1, PRUNE: None}  # with what they are if left out
BETTER = {"bits_per_byte": False, "val_loss": False, "val_perplexity": False, "accuracy": True}  # where more of it is
WAYS = {"lowest": False, "highest": True}
NAME = re.compile(r"[A-Za-z_][\w.+-]*")
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")  # what Hydra's grammar takes for one word
WORDS = {"null", "true", "false", "nan", "inf"}  # what it takes for values rather than names


@dataclass(frozen=True)
class Run:
    """An entry of ``runs``: the overrides that it trains with, the arguments that it measures with, or a checkpoint."""

    name: str
    after: str | None = None
    lines: tuple[str, ...] = ()
    measures: bool = False
    given: str | None = None


@dataclass(frozen=True)
class Range:
    """Numbers between two that can be tried, both included: integers where both are; evenly by their logarithm, or by
    themselves."""

    low: int | float
    high: int | float
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{' (log)' if self.log else ''}"


@dataclass(frozen=True)
class Tune:
    """What ``tune`` says: values to try, and how.

    Attributes:
        grids: the values by key, in the order of the yaml; ranges for Optuna alone.
        by: keys of ``summary.json``, the first of which a run has decides, and whether more of it is better.
        seeds: that each combination is trained with.
        grow: how often a grid may grow.
        until: of several runs, the last one that is trained; None: all that train.
        tuner: who chooses what is tried, ``grid`` or ``optuna``.
        attempts: combinations that Optuna chooses for an arm.
        at_once: of these, how many it chooses before it hears of them.
        prune: whether attempts whose validation is worse than that of most are ended early.
    """

    grids: dict[str, list[Any] | Range]
    by: dict[str, bool]
    seeds: list[int]
    grow: int
    until: str | None
    tuner: str = GRID
    attempts: int = FOR_OPTUNA[ATTEMPTS]
    at_once: int = FOR_OPTUNA[AT_ONCE]
    prune: bool = False


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
        _check_overrides(f"arms.{name}", overrides, NOT_FOR_ARMS)
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
        _check_overrides(f"runs.{name}", lines, NOT_FOR_RUNS)
        return Run(name, after, tuple(lines))
    if len(entries) > 1:
        raise ConfigError(f"runs.{name} has evaluate beside other keys: let one run train, and another evaluate it")
    wanted = entries[EVALUATE] or {}
    if not isinstance(wanted, Mapping):
        raise ConfigError(f"runs.{name}.evaluate is {wanted!r}, but maps arguments of evaluate.py to values")
    lines = commands.words(_flat(f"runs.{name}.evaluate", wanted))
    for word in commands.choose(lines)[1]:
        if word.partition("=")[0] in TOLD:
            raise ConfigError(f"runs.{name}.evaluate has {word}, which is the experiment's to say: leave it out")
    try:  # what evaluate.py would not take is refused now, not when everything is trained
        commands.asked(lines)
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
    if isinstance(value, str) and is_group(name):
        raise ConfigError(f"runs.{run}.{name} is '{value}', but {name} is a group: write /{name}: {value}")
    return f"{name.removeprefix('/')}={quoted(value)}"


def is_group(name: str) -> bool:
    """Whether it is a folder of variants, of the project or of the user's own."""
    return any((place / name).is_dir() for place in paths.config_folders())


def differing(config: Mapping[str, Any]) -> list[str]:
    """The paths in the configuration that arms of its experiment set differently, those of most arms first
    (``choices.model/writer``, ``model.state_size``); empty for a run that belongs to none."""
    contents = read_json(Path(config["logs"]) / str(config["name"]) / CONTENTS) or {}
    try:
        arms = [{key_of(line): line for line in lines} for lines in read_arms(contents.get("arms")).values()]
    except ConfigError:  # no such file, or none that an experiment has written
        return []
    count = Counter(key for arm in arms for key in arm)
    differ = [key for key, _ in count.most_common() if len({arm.get(key) for arm in arms}) > 1]
    return [f"choices.{key}" if is_group(key) else key for key in differ]


def read_chosen(wanted: Any, arms: Mapping[str, list[str]]) -> list[str]:
    """The arms that ``arm=`` picks. Raises ConfigError for one that there is not."""
    names = [str(name) for name in (wanted if isinstance(wanted, list) else [wanted])]
    for name in names:
        if name not in arms:
            raise unknown("arm", name, arms, "the experiment")
    return list(dict.fromkeys(names))


def read_seeds(seeds: Any) -> list[int]:
    """``[0, 2]``, or 3 for the first three. Raises ConfigError."""
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(seeds))
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int or seed < 0 for seed in seeds):
        raise ConfigError(f"seeds is {seeds!r}, but takes a list such as [0,1,2], or how many: seeds=3")
    return list(dict.fromkeys(seeds))


def read_columns(table: Any) -> list[str]:
    """The keys that the table shows. Raises ConfigError."""
    if table is None:
        return list(COLUMNS)
    if not isinstance(table, list) or not table or not all(isinstance(column, str) for column in table):
        raise ConfigError(f"table is {table!r}, but takes a list of keys of summary.json such as [bits_per_byte]")
    return table


def read_tune(tune: Any, columns: Sequence[str], runs: Any = None) -> Tune | None:
    """What is to be tuned; None: nothing. Raises ConfigError.

    Args:
        tune: of the configuration.
        columns: of the table; the first that says which way is better decides, if nothing else is said.
        runs: of the configuration, for what is to be trained.
    """
    if tune is None:
        return None
    if not isinstance(tune, Mapping):
        raise ConfigError(
            f"tune is {tune!r}, but maps keys to values to try: {{optimizer.learning_rate: [3e-3, 6e-3]}}"
        )
    entries = dict(tune)
    tuner = _read_tuner(entries)
    own = {key: entries.pop(key, usual) for key, usual in FOR_OPTUNA.items()}
    by, seeds, grow, until = (
        entries.pop(key, usual) for key, usual in ((BY, None), ("seeds", 1), (GROW, 3), (UNTIL, None))
    )
    grids = _read_ranges(_flat("tune", entries))
    if not grids:
        raise ConfigError("tune names no key to try values of: {optimizer.learning_rate: [3e-3, 6e-3]} does")
    for key, values in grids.items():
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
        _check_overrides("tune", [f"{key.removeprefix('/')}={quoted(first(values))}"], NOT_FOR_TUNING)
    if type(grow) is not int or not 0 <= grow <= 100:
        raise ConfigError(f"tune.grow is {grow!r}, but has to be how often a grid may grow, from 0 to 100")
    trained = [run.name for run in parse_runs(runs) if not (run.measures or run.given)] if runs is not None else []
    if until is not None and until not in trained:
        raise unknown("run", str(until), trained, "the runs that train")
    for key in (ATTEMPTS, AT_ONCE):
        if type(own[key]) is not int or not 1 <= own[key] <= 10_000:
            raise ConfigError(f"tune.{key} is {own[key]!r}, but has to be a number of attempts, from 1 to 10000")
    decide, several = _read_by(by, columns), read_seeds(seeds)
    prune = _read_prune(own[PRUNE], decide, several, tuner)
    return Tune(grids, decide, several, grow, until, tuner, own[ATTEMPTS], own[AT_ONCE], prune)


def first(values: Sequence[Any] | Range) -> Any:
    """The first value of a list, the lowest of a range."""
    return values.low if isinstance(values, Range) else values[0]


def last(values: Sequence[Any] | Range) -> Any:
    """The last value of a list, the highest of a range."""
    return values.high if isinstance(values, Range) else values[-1]


def _read_tuner(entries: dict[str, Any]) -> str:
    """Who chooses what is tried, taken out of what ``tune`` says. Raises ConfigError."""
    tuner = entries.pop(TUNER, GRID)
    if tuner not in (GRID, OPTUNA):
        raise unknown("tuner", str(tuner), [GRID, OPTUNA], "tune.tuner")
    foreign = [key for key in ([GROW] if tuner == OPTUNA else FOR_OPTUNA) if key in entries]
    if foreign:
        other = GRID if tuner == OPTUNA else OPTUNA
        raise ConfigError(
            f"tune.{foreign[0]} is {entries[foreign[0]]!r}, which is for tune.tuner={other}, but it is {tuner}: "
            "leave one of them out"
        )
    if tuner == OPTUNA and find_spec("optuna") is None:
        raise ConfigError(f"tune.tuner=optuna needs the extra tune: {paths.install('tune')}")
    return tuner


def _read_ranges(grids: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key, where what is said below a key of its low and its high end becomes a range."""
    ranged = dict.fromkeys(key.rpartition(".")[0] for key in grids if key.rpartition(".")[2] in ("low", "high"))
    found: dict[str, Any] = {}
    for key, values in grids.items():
        above = next((one for one in ranged if key.startswith(f"{one}.")), None)
        if above is None:
            found[key] = values
        elif above not in found:
            found[above] = _read_range(
                above, {name[len(above) + 1 :]: one for name, one in grids.items() if name.startswith(f"{above}.")}
            )
    return found


def _read_range(key: str, said: Mapping[str, Any]) -> Range:
    for name in said:
        if name not in ("low", "high", "log"):
            raise unknown("entry", name, ["low", "high", "log"], f"tune.{key}")
    for name in ("low", "high"):
        value = said.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"tune.{key}.{name} is {value!r}, but a range takes two numbers: {{low: 1, high: 8}}")
    low, high, log = said["low"], said["high"], said.get("log", False)
    if low >= high:
        raise ConfigError(f"tune.{key} goes from low {low} to high {high}: give low the smaller number")
    if not isinstance(log, bool):
        raise ConfigError(f"tune.{key}.log is {log!r}, but has to be true or false")
    if log and low <= 0:
        raise ConfigError(f"tune.{key}.low is {low}, which has no logarithm: give low above 0, or leave log out")
    return Range(low, high, log)


def _read_prune(prune: Any, by: Mapping[str, bool], seeds: Sequence[int], tuner: str) -> bool:
    """Whether attempts are ended early; where nothing is said, wherever that can be. Raises ConfigError."""
    if prune not in (None, True, False):
        raise ConfigError(f"tune.{PRUNE} is {prune!r}, but has to be true or false")
    if prune and len(seeds) > 1:
        raise ConfigError(
            f"tune.{PRUNE} is true, but tune.seeds {list(seeds)}: of several seeds the mean decides, which is known "
            f"in the end alone; give one seed, or tune.{PRUNE}=false"
        )
    if prune and not by.keys() <= VALIDATION.keys():
        raise ConfigError(
            f"tune.{PRUNE} is true, but {', '.join(by)} is not known while a run trains: say tune.by as one of "
            f"{', '.join(VALIDATION)}, or tune.{PRUNE}=false"
        )
    possible = tuner == OPTUNA and len(seeds) == 1 and by.keys() <= VALIDATION.keys()
    return possible if prune is None else bool(prune)


def _read_by(by: Any, columns: Sequence[str]) -> dict[str, bool]:
    """The keys that decide, and whether more of them is better."""
    if by is None:
        found = {column: _more_is_better(column) for column in columns if "/" not in column}
        known = {column: more for column, more in found.items() if more is not None}
        if not known:
            raise ConfigError(
                f"tune does not say which number decides, and of the table's ({', '.join(columns)}) none is known to "
                "be better where it is lower or where it is higher: say tune.by={accuracy: highest}"
            )
        return known
    if isinstance(by, str) and _more_is_better(by) is not None:
        by = {by: "highest" if _more_is_better(by) else "lowest"}
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


def _more_is_better(column: str) -> bool | None:
    """As the last word of a column says; None: nobody knows."""
    return BETTER.get(column.rpartition(".")[2])


def _check_name(where: str, name: str) -> None:
    if not NAME.fullmatch(name) or name in WORDS:
        raise ConfigError(
            f"{where} has the name '{name}', but a name begins with a letter and has no spaces or slashes"
        )


def _check_overrides(where: str, lines: Iterable[str], reserved: Set[str]) -> None:
    """Raises ConfigError, which names ``where``, for an override that cannot be read, or is the experiment's to say."""
    for line in lines:
        try:
            sets = key_of(line)
        except HydraException as error:
            raise ConfigError(f"{where}: cannot read '{line}': write key=value or group=option") from error
        if sets in reserved:
            raise ConfigError(f"{where} sets {sets}, which is the experiment's: leave {line} out")


def key_of(line: str) -> str:
    """The key or group that an override sets. Raises HydraException."""
    return OverridesParser.create().parse_override(line).key_or_group


def quoted(value: Any) -> str:
    """A value as an override on the command line has it."""
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    plain = not isinstance(value, str | Path) or (PLAIN.fullmatch(text) and text not in WORDS)
    return text if plain else QuotedString(text=text, quote=Quote.single).with_quotes()
