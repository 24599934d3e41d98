"""The keys of a configuration that make an experiment of it, read and checked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gsm import paths
from gsm.config.check import ConfigError, flat, unknown
from gsm.config.compose import WORDS, quoted
from gsm.evaluation import commands
from gsm.experiments import SEVERAL

# Keys of the parent; a run gets its own.
OWN = {*SEVERAL, "name", "arm", "seed", "jobs", "labels", "table", "plan"}
NOT_FOR_ARMS = {*OWN, "logs", "folder", "label", "experiment"}
NOT_FOR_RUNS = {*NOT_FOR_ARMS, "runs", "start_from"}
RESERVED = ("checkpoint", "output")  # arguments of evaluate.py that the experiment sets
SHAPES = {  # of the keys of an experiment, in words
    "arms": "names with lists of overrides, as {plain: [model/residual=plain]}",
    "labels": "arms and columns with the names that pages give them, as {plain: plain residual}",
    "seeds": "a list of whole numbers, as [0,1,2], or 3 for the first three",
    "runs": "names with keys and values, as {train: {trainer.max_steps: 9}}",
    "tune": "keys with lists of values, as {optimizer.learning_rate: [1e-3, 2e-3]}",
    "table": "a list of keys of summary.json, as [bits_per_byte]",
}
NAME = re.compile(r"[A-Za-z_][\w.+-]*")


@dataclass
class Keys:
    """The keys of an experiment, in their types; null where the configuration has none."""

    arms: dict[str, list[str] | None] | None = None  # null leaves out an arm of the experiment that it builds on
    labels: dict[str, str] | None = None
    seeds: list[int] | None = None
    runs: dict[str, Any] | None = None
    tune: dict[str, Any] | None = None
    table: list[str] | None = None


@dataclass(frozen=True)
class Entry:
    """An entry of ``runs``: overrides to train with, arguments to measure with, or the path of a checkpoint."""

    name: str
    after: str | None = None
    lines: tuple[str, ...] = ()
    measures: bool = False
    checkpoint: str | None = None

    @property
    def trains(self) -> bool:
        """Whether it trains."""
        return not (self.measures or self.checkpoint)


def read_keys(config: Mapping[str, Any], above: str = "") -> Keys:
    """Return the keys of an experiment, as OmegaConf converts them; seeds may be 3 for the first three.

    Raises ConfigError.
    """
    keys = OmegaConf.structured(Keys)
    for name in (one.name for one in fields(Keys) if config.get(one.name) is not None):
        value = list(range(config[name])) if name == "seeds" and type(config[name]) is int else config[name]
        try:
            keys = OmegaConf.merge(keys, {name: value})
        except OmegaConfBaseException as error:
            raise ConfigError(f"{above}{name} must be {SHAPES[name]}, got {value!r}") from error
        if not value:
            raise ConfigError(f"{above}{name} must have an entry, got {config[name]!r}")
    return Keys(**cast(dict[str, Any], OmegaConf.to_container(keys)))


def read_arms(arms: Mapping[str, list[str] | None]) -> dict[str, list[str]]:
    """Return the arms of an experiment, without those that are null. Raises ConfigError."""
    kept = {name: overrides for name, overrides in arms.items() if overrides is not None}
    if not kept:
        raise ConfigError(f"arms must have one that is not null, got {', '.join(arms)}")
    for name, overrides in kept.items():
        _check_name("arms", name)
        check_overrides(f"arms.{name}", overrides, NOT_FOR_ARMS)
    return kept


def parse_runs(runs: Any) -> list[Entry]:
    """Return the runs of a configuration, in its order. Raises ConfigError."""
    entries: dict[str, Entry] = {}
    for name, value in (read_keys({"runs": runs}).runs or {}).items():
        entry = _parse_entry(name, value)
        before = entries.get(entry.after or "")
        if entry.after is not None and before is None:
            raise ConfigError(f"runs.{name}.after must be a run before it ({', '.join(entries)}), got {entry.after}")
        if before and before.measures:
            raise ConfigError(f"runs.{name}.after must be a run that trains, got {entry.after}, which measures")
        if entry.measures and entry.after is None:
            raise ConfigError(f"runs.{name}.evaluate needs runs.{name}.after, the run to measure")
        entries[name] = entry
    if all(entry.checkpoint for entry in entries.values()):
        raise ConfigError(f"runs must have one that trains or measures, got the checkpoints {', '.join(entries)}")
    return list(entries.values())


def _parse_entry(name: str, value: Any) -> Entry:
    _check_name("runs", name)
    if isinstance(value, str):
        return Entry(name, checkpoint=value)
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"runs.{name} must map keys to values, or be the path of a checkpoint, got {value!r}")
    keys = dict(value or {})
    after = None if (first := keys.pop("after", None)) is None else str(first)
    if "evaluate" not in keys:
        lines = [_line(name, key, value) for key, value in flat_entries(f"runs.{name}", keys).items()]
        check_overrides(f"runs.{name}", lines, NOT_FOR_RUNS)
        return Entry(name, after, tuple(lines))
    arguments = keys.pop("evaluate")
    if keys or not isinstance(arguments, Mapping | None):
        raise ConfigError(f"runs.{name}.evaluate must map arguments of evaluate.py to values, alone, got {value}")
    lines = commands.words(flat_entries(f"runs.{name}.evaluate", arguments or {}))
    for word in commands.choose(lines)[1]:
        if word.partition("=")[0] in RESERVED:
            raise ConfigError(f"runs.{name}.evaluate must leave {' and '.join(RESERVED)} out, got {word}")
    with naming(f"runs.{name}.evaluate"):  # raises for wrong arguments of evaluate.py, before anything is trained
        commands.parse(lines)
    return Entry(name, after, tuple(lines), measures=True)


def flat_entries(where: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return every value under its path, in the order of the yaml.

    Where `a.b: 1` and `a: {b: 2}` are both there, the second counts: ++runs.<name>.a.b=2 sets that.
    """
    empty = [key for key, value in entries.items() if isinstance(value, Mapping) and not flat(value)]
    if empty:
        raise ConfigError(f"{where}.{empty[0]} must have a value, got {entries[empty[0]]}")
    return flat(entries) | flat({key: value for key, value in entries.items() if "." not in key})


def _line(run: str, name: str, value: Any) -> str:
    """Return a key of a run with its value as an override. Raises ConfigError for a group without its leading slash."""
    if isinstance(value, str) and is_group(name):
        raise ConfigError(f"runs.{run}.{name} must be written /{name}: {value}, got a key without the slash of a group")
    return f"{name.removeprefix('/')}={quoted(value)}"


def is_group(name: str) -> bool:
    """Return whether a name is a group of variants, of the project or of the user."""
    return any((place / name).is_dir() for place in paths.config_folders())


def read_chosen(wanted: Any, arms: Mapping[str, list[str]]) -> list[str]:
    """Return the arms that ``arm=`` picks. Raises ConfigError for an unknown arm."""
    names = [str(name) for name in (wanted if isinstance(wanted, list) else [wanted])]
    for name in names:
        if name not in arms:
            raise unknown("arm", name, arms, "the experiment")
    return list(dict.fromkeys(names))


def _check_name(where: str, name: str) -> None:
    if not NAME.fullmatch(name) or name in WORDS:
        raise ConfigError(f"{where}: a name must begin with a letter and have no spaces or slashes, got '{name}'")


def check_overrides(where: str, lines: Iterable[str], reserved: Set[str]) -> None:
    """Raise ConfigError, which names ``where``, for an override that cannot be read, or that the experiment sets."""
    for line in lines:
        try:
            sets = key_of(line)
        except HydraException as error:
            raise ConfigError(f"{where} must have overrides as key=value or group=option, got {line}") from error
        if sets in reserved:
            raise ConfigError(f"{where} must leave out {sets}, which the experiment sets, got {line}")


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Prefix the message of an error with its place."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def key_of(line: str) -> str:
    """Return the key or group that an override sets. Raises HydraException."""
    return OverridesParser.create().parse_override(line).key_or_group
