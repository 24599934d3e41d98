"""Check the keys and the types of values in a configuration before anything is built.

The schema of a mapping with a ``_target_`` is the signature of its constructor. The schema of any other mapping is the
keys in all yamls of its group (``gsm.config.options.reference``).
"""

from __future__ import annotations

import collections.abc
import difflib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gsm.errors import ConfigError, within

# Keys of a part that are no arguments of its constructor: other code reads them.
CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, default=1, annotation=int)
BESIDE = {"trainer": {"context": CONTEXT}}
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
NAMED_PARTS = {"callbacks", "logger"}  # groups whose mapping holds parts under names that anyone may add to
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)

PATHS = ("logs", "folder", "start_from")
PLACES = ("name", "arm", *PATHS)


def check(config: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    """Check a composed and resolved configuration.

    Args:
        config: plain containers.
        reference: a mapping with all allowed keys. A part with a ``_target_`` needs none: the signature of its
            constructor has them.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type.
    """
    sources = ("size", "recipe")  # first, so that an error names them rather than the parts that repeat their numbers

    def rank(item: tuple[str, Any]) -> tuple[bool, bool, bool]:
        return isinstance(item[1], Mapping), item[0] not in sources, item[0] == "model"

    for key, value in sorted(config.items(), key=rank):
        if key not in reference:
            raise unknown("key", key, reference, "the configuration")
        if isinstance(reference[key], int) and not fits(value, type(reference[key])):
            takes = type(reference[key]).__name__
            raise ConfigError(f"{key} must be {takes}, got {value!r} ({type(value).__name__})")
        if isinstance(value, Mapping):
            _check_mapping(value, reference[key], key)
    within(0, 2**32 - 1, seed=config.get("seed"))
    within(1, jobs=config.get("jobs"))


def check_place(key: str, value: Any) -> None:
    """Raise ConfigError unless ``name`` and ``arm`` are names of one folder, and other keys are paths of folders."""
    if key == "start_from" and value is None:
        return
    text, is_path = str(value), key in PATHS
    is_root = is_path and Path(text).resolve() == Path(text).resolve().parent
    several = not is_path and ("/" in text or text.startswith("."))
    if type(value) not in ((str,) if is_path else (str, int, float)) or not text.strip() or is_root or several:
        what = "the path of a folder" if is_path else "the name of a folder, without slashes or a leading dot"
        raise ConfigError(f"{key} must be {what}, got {value!r:.60}")


def unknown(kind: str, name: str, known: Collection[str], place: str) -> ConfigError:
    """Return the error for a name that is not ``known``. It proposes the names that are spelled most like it."""
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1].lower(), known, n=3)
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    return ConfigError(f"unknown {kind} '{name}'{meant} Known in {place}: {', '.join(sorted(known)) or 'nothing'}")


def few(items: Sequence[str]) -> str:
    """Return the first three, and the number of the others."""
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return every value of nested mappings by the path to it."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return values


def contrast(there: Mapping[str, Any], here: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return the differences of two flat configurations: ``data.batch_size (4 there, 8 here)``."""
    return [
        f"{key} ({there.get(key, 'nothing')} there, {here.get(key, 'nothing')} here)"
        for key in keys
        if there.get(key) != here.get(key)
    ]


def unlike(there: Mapping[str, str | int], here: Mapping[str, str | int]) -> list[str]:
    """Return the differences of two fingerprints of data: ``the data's tokenizer (1f0c... there, 77ab... here)``."""
    return [
        f"the data's {key} ({shortened(there.get(key, 'nothing'))} there, {shortened(here.get(key, 'nothing'))} here)"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]


def shortened(value: str | int) -> str:
    """Return the first twelve characters of a long text, such as a hash."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else str(value)


def parameters(target: str) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a ``_target_`` by name; None if it takes any keyword, or has no signature.

    Raises ConfigError if it cannot be imported.
    """
    module, _, name = target.rpartition(".")
    try:
        taker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_ must be the import path of a class or function, got {target}: {error}") from error
    try:
        hints = typing.get_type_hints(taker.__init__ if inspect.isclass(taker) else taker)
    except (NameError, TypeError):
        hints = {}
    try:
        by_name = inspect.signature(taker).parameters
    except ValueError:  # written in C, without a signature to read
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in by_name.values()):
        return None
    return {name: p.replace(annotation=hints.get(name, Any)) for name, p in by_name.items()}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value from a yaml fits a type hint; True for a hint that this function does not know."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return any(type(value) is type(option) for option in typing.get_args(hint))
    if hint in (None, type(None)):
        return value is None
    if hint in (bool, int, float, str):
        taken = (int, float) if hint is float else hint
        return isinstance(value, taken) and (hint is bool or not isinstance(value, bool))
    if inspect.isclass(hint) and hint.__module__.partition(".")[0] == "gsm":
        return isinstance(value, hint)
    if (typing.get_origin(hint) or hint) in SEQUENCES:
        inner = [option for option in typing.get_args(hint) if option is not ...]
        return isinstance(value, list | tuple) and (len(inner) != 1 or all(fits(item, inner[0]) for item in value))
    return True


def _check_mapping(node: Mapping[str, Any], reference: Any, path: str) -> None:
    """Check the keys of one mapping, then those below."""
    references = reference if isinstance(reference, Mapping) else {}
    if "_target_" in node:
        _check_arguments(node, path)
    elif isinstance(reference, Mapping):
        for key, value in node.items():
            is_part = path in NAMED_PARTS and isinstance(value, Mapping) and "_target_" in value
            if key not in reference and not is_part:
                raise unknown("key", f"{path}.{key}", reference, path)
            if path in NAMED_PARTS and isinstance(value, Mapping) and not is_part:
                raise ConfigError(
                    f"{path}.{key} must be a key of the chosen yaml, got {value!r:.60}; choose a variant of {path}= "
                    "that has it"
                )
    for key, value in node.items():
        if isinstance(value, Mapping):
            _check_mapping(value, references.get(key), f"{path}.{key}")


def _check_arguments(node: Mapping[str, Any], path: str) -> None:
    """Check the keys and values of one mapping against the signature of its ``_target_``."""
    taken = parameters(node["_target_"])
    taken = taken if taken is None else {**taken, **BESIDE.get(path, {})}
    place = f"{path} ({node['_target_']})"
    for key, value in node.items():
        if key.startswith("_"):
            if key not in HYDRA_KEYS:
                raise unknown("key", f"{path}.{key}", HYDRA_KEYS, place)
        elif taken is not None and key not in taken:
            raise unknown("key", f"{path}.{key}", taken, place)
        elif taken is not None:
            _check_value(f"{path}.{key}", value, taken[key])
    if node.get("_partial_") or "_args_" in node:  # the rest comes from the caller
        return
    for key, parameter in (taken or {}).items():
        if parameter.default is inspect.Parameter.empty and parameter.kind in NAMED and key not in node:
            raise ConfigError(f"{path}.{key} must be given: {node['_target_']} requires it")


def _check_value(path: str, value: Any, parameter: inspect.Parameter) -> None:
    """Check the type of a value against the hint of the parameter that takes it."""
    hint = parameter.annotation
    is_part = isinstance(value, Mapping) and "_target_" in value
    if is_part or value is None and parameter.default is None or fits(value, hint):
        return
    name = hint.__name__ if inspect.isclass(hint) else re.sub(r"(typing|collections\.abc)\.", "", str(hint))
    raise ConfigError(f"{path} must be {name}, got {value!r} ({type(value).__name__})")
