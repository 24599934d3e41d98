"""What an experiment's configuration says of its arms, seeds and columns, read and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from gsm.config.check import ConfigError, unknown
from gsm.experiments.table import COLUMNS

OWN = ("arm", "arms", "seed", "seeds", "jobs", "force", "table")  # the parent's keys; a child gets its own
NOT_FOR_ARMS = {*OWN, "name", "logs", "folder", "experiment", "resume"}
NAME = re.compile(r"[A-Za-z_][\w.+-]*")
WORDS = {"null", "true", "false", "nan", "inf"}  # what Hydra takes for values rather than names


def read_arms(arms: Any) -> dict[str, list[str]]:
    """The arms of a configuration, checked; without those that are null, which an experiment does not take over from
    the one that it builds on. Raises ConfigError."""
    if not isinstance(arms, Mapping) or not arms:
        raise ConfigError(
            f"arms is {arms!r}, but maps names to overrides, for example {{plain: [model/residual=plain]}}"
        )
    arms = {name: overrides for name, overrides in arms.items() if overrides is not None}
    for name, overrides in arms.items():
        if not NAME.fullmatch(str(name)) or str(name) in WORDS:
            raise ConfigError(
                f"arms has the name '{name}', but a name begins with a letter and has no spaces or slashes"
            )
        if not isinstance(overrides, list) or not all(isinstance(line, str) for line in overrides):
            raise ConfigError(f"arms.{name} is {overrides!r}, but takes a list of overrides such as [model=baseline]")
        check_overrides(f"arms.{name}", overrides, NOT_FOR_ARMS, "the experiment's")
    return {str(name): list(overrides) for name, overrides in arms.items()}


def check_overrides(where: str, lines: Iterable[str], reserved: Set[str], owner: str) -> None:
    """Raises ConfigError, which names ``where``, for an override that cannot be read or sets what is its owner's."""
    for line in lines:
        try:
            sets = key(line)
        except HydraException as error:
            raise ConfigError(f"{where}: cannot read '{line}': write key=value or group=option") from error
        if sets in reserved:
            raise ConfigError(f"{where} sets {sets}, which is {owner}: leave {line} out")


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


def key(line: str) -> str:
    """The key or group that an override sets. Raises HydraException."""
    return OverridesParser.create().parse_override(line).key_or_group
