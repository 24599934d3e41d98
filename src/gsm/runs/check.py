"""Misspelt keys and unknown variants become one sentence that names them, before anything is built.

There is no second description of the configuration to keep in step: for a mapping with a ``_target_`` the constructor's signature is the
schema; for one without, what counts is the same place in a reference, composed from the same group choices without experiment and values;
and for the numbers of a group without ``_target_`` (``size``), whether any yaml asks for them, as ``${size.width}``.
"""

from __future__ import annotations

import collections.abc
import difflib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
NAMED_PARTS = {"callbacks", "logger"}  # groups whose mapping holds parts under names that anyone may add to
SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


class ConfigError(ValueError):
    """The configuration is wrong; the message is one sentence for the person who wrote it."""


def check(config: Mapping[str, Any], reference: Mapping[str, Any], directories: Collection[Path]) -> None:
    """Checks a composed and resolved configuration.

    Args:
        config: plain containers.
        reference: the same groups, without experiment and overrides.
        directories: the folders that yaml files are taken from.

    Raises:
        ConfigError: a key that nothing takes, or a value of a type that its taker does not accept.
    """
    for key, value in config.items():
        if key not in reference:
            raise unknown("key", key, reference, "the configuration", directories)
        if isinstance(value, Mapping):
            _check_mapping(value, reference[key], key, directories)


def unknown(kind: str, name: str, known: Collection[str], place: str, directories: Collection[Path] = ()) -> ConfigError:
    """The error for a name that is not among ``known``: says where it stands, proposes the nearest, lists them all."""
    last = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(last, known, n=3, cutoff=0.5) or [option for option in sorted(known) if last in option][:3]
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    found = f" in {where}" if (where := _file_with(last, directories)) else ""
    return ConfigError(f"unknown {kind} '{name}'{found}{meant} Known in {place}: {', '.join(sorted(known)) or 'nothing'}")


def parameters(target: str) -> dict[str, inspect.Parameter] | None:
    """Parameters of a ``_target_``, by name; None if it takes any. Raises ConfigError for one that cannot be imported."""
    module, _, name = target.rpartition(".")
    try:
        taker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_ '{target}' cannot be imported: {error}") from error
    try:
        hints = typing.get_type_hints(taker.__init__ if inspect.isclass(taker) else taker)
    except (NameError, TypeError):
        hints = {}
    try:
        found = inspect.signature(taker).parameters
    except ValueError:  # written in C, without a signature to read
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values()):
        return None
    return {name: p.replace(annotation=hints.get(name, Any)) for name, p in found.items()}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from a yaml can be what the type hint asks for; True where that is not plain to see."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return any(type(value) is type(option) for option in typing.get_args(hint))
    if hint in (None, type(None)):
        return value is None
    if hint in (bool, int, float, str):
        taken = (int, float) if hint is float else hint
        return isinstance(value, taken) and (hint is bool or not isinstance(value, bool))
    if (typing.get_origin(hint) or hint) in SEQUENCES:
        inner = [option for option in typing.get_args(hint) if option is not ...]
        return isinstance(value, list | tuple) and (len(inner) != 1 or all(fits(item, inner[0]) for item in value))
    return True


def _check_mapping(node: Mapping[str, Any], reference: Any, path: str, directories: Collection[Path]) -> None:
    """Checks the keys of one mapping, then what lies below."""
    reference = reference if isinstance(reference, Mapping) else None
    if "_target_" in node:
        known = parameters(node["_target_"])
        place = f"{path} ({node['_target_']})"
    else:
        known = _asked_for(path, directories) if "." not in path and reference is not None else None
        known = known if known is not None else reference
        place = path
    for key, value in node.items():
        below = f"{path}.{key}"
        if key.startswith("_") and "_target_" in node:
            if key not in HYDRA_KEYS:
                raise unknown("key", below, HYDRA_KEYS, place, directories)
            continue
        is_part = path in NAMED_PARTS and isinstance(value, Mapping) and "_target_" in value
        if known is not None and key not in known and not is_part:
            raise unknown("key", below, known, place, directories)
        if known is not None and isinstance(known.get(key), inspect.Parameter):
            _check_value(below, value, known[key])
        if isinstance(value, Mapping):
            _check_mapping(value, (reference or {}).get(key), below, directories)


def _check_value(path: str, value: Any, parameter: inspect.Parameter) -> None:
    """Checks the type of a value against the hint of the parameter that takes it."""
    if isinstance(value, Mapping) or value is None and parameter.default is None:
        return
    if not fits(value, parameter.annotation):
        hint = parameter.annotation
        name = hint.__name__ if inspect.isclass(hint) else str(hint).replace("typing.", "").replace("collections.abc.", "")
        raise ConfigError(f"{path} is {value!r} ({type(value).__name__}), but takes {name}")


def _asked_for(group: str, directories: Collection[Path]) -> dict[str, None] | None:
    """Names that some yaml asks for as ``${group.name}``; None where the group is not one of shared numbers."""
    if group in NAMED_PARTS or not any((folder / group).is_dir() for folder in directories):
        return None
    pattern = re.compile(r"\$\{" + re.escape(group) + r"\.(\w+)")
    texts = (file.read_text(encoding="utf-8") for folder in directories for file in folder.rglob("*.yaml"))
    return {name: None for text in texts for name in pattern.findall(text)} or None


def _file_with(key: str, directories: Collection[Path]) -> str | None:
    """The yaml that sets a key, if just one does: most misspellings are unique."""
    pattern = re.compile(rf"^\s*{re.escape(key)}\s*:", re.MULTILINE)
    files = [file for folder in directories for file in folder.rglob("*.yaml") if pattern.search(file.read_text(encoding="utf-8"))]
    return f"{files[0].parent.name}/{files[0].name}" if len(files) == 1 else None
