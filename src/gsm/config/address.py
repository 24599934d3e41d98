"""The address of a run: a hash of everything in its configuration that decides its training.

A run lies in ``logs/<name>/<label>-<address>`` and is found by the address alone: the same configuration finds its run
again, and any other configuration is another run in another folder. The entry ``address`` of ``configs/train.yaml`` has
the keys that do not enter the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from gsm.config.check import ConfigError, contrast, flat
from gsm.config.options import saved
from gsm.files import DAMAGED

DIGITS = 8
CONFIG = "config.yaml"  # in the folder of a run: its configuration
CONTENTS = "experiment.json"  # in an experiment's folder: its arms in their order, and the columns of its table
TUNING = "tuning"  # in an experiment's folder: the runs that choose its values


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a composed configuration that decide its training, by key."""
    rule, everything = config["address"], flat(moved(config, config["folder"], ""))
    values = {key: _whole(value) for key, value in everything.items()}
    for key in rule["paths"]:  # the same data may lie elsewhere; what is read there is compared by its fingerprint
        if isinstance(values.get(key), str):
            values[key] = Path(values[key]).name
    kept = _without(values, [*rule["label"], *rule["machine"], *rule["watch"]])
    if not any(key.startswith("callbacks.") for key in kept):  # nothing can train by a validation
        kept = _without(kept, rule["validation"])
    kept |= {key: values[key] for key in rule["absent"] if key in values}
    return {key: value for key, value in kept.items() if key not in rule["absent"] or value != rule["absent"][key]}


def address(config: Mapping[str, Any]) -> str:
    """Return the address, 8 hexadecimal digits; two configurations share it if and only if they train the same."""
    return hashed(decisive(config))


def address_of_all_seeds(config: Mapping[str, Any]) -> str:
    """Return the address without the seed, which all seeds of an arm share."""
    return hashed(of_all_seeds(config))


def origin(config: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
    """Return where weights come from: the run with this configuration, and its step (None: the last one)."""
    return {"run": address(config), "settings": address_of_all_seeds(config), "step": step}


def of_all_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that decide the training of all seeds of an arm, by key."""
    return {key: value for key, value in decisive(config).items() if key.rpartition(".")[2] not in ("seed", "run")}


def differences(there: Mapping[str, Any], here: Mapping[str, Any], without: Collection[str] = ()) -> list[str]:
    """Return the keys in which the training of two configurations differs, as ``seed (0 there, 1 here)``. Keys in
    ``without`` are not compared."""
    first, second = (_without(decisive(one), without) for one in (there, here))
    keys = sorted(first.keys() | second.keys(), key=lambda key: (key.startswith("model."), key))
    return contrast(first, second, keys)


def placed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed configuration whose folder ends in the address; a run that exists keeps its folder."""
    place, digits = Path(config["folder"]), address(config)
    there = find(place.parent, digits) or place.with_name(f"{place.name}-{digits}")
    return moved(config, str(place), str(there))


def changed(config: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Return a placed configuration with some values replaced, in the folder of its new address."""
    place = Path(config["folder"])
    return placed({**moved(config, str(place), str(place.with_name(config["label"]))), **values})


def find(experiment: Path, digits: str) -> Path | None:
    """Return the folder of the run with this address in ``logs/<name>``; None if it has not begun."""
    return min(experiment.glob(f"*-{digits}"), default=None)


def noted(folder: Path) -> Mapping[str, Any]:
    """Return the configuration that a run saved in its folder; empty without a file. Raises ConfigError if damaged."""
    config = saved(folder / CONFIG) or {}
    if not isinstance(config, Mapping):
        raise ConfigError(DAMAGED.format(folder / CONFIG, "it holds no keys"))
    return config


def moved(value: Any, old: str, new: str) -> Any:
    """Return a configuration in which all paths inside the folder ``old`` are moved to the folder ``new``."""
    if isinstance(value, Mapping):
        return {key: moved(below, old, new) for key, below in value.items()}
    if isinstance(value, list):
        return [moved(below, old, new) for below in value]
    inside = isinstance(value, str) and (value == old or value.startswith(f"{old}/"))
    return new + value[len(old) :] if inside else value


def _without(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the values without these keys and those below them."""
    given = tuple(keys)
    return {key: value for key, value in values.items() if not f"{key}.".startswith(tuple(f"{one}." for one in given))}


def _whole(value: Any) -> Any:
    """Return 1.0 as 1, which trains the same."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def hashed(values: Any) -> str:
    """Return the beginning of the SHA-256 of plain containers."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]
