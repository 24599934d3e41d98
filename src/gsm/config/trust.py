"""What a file may ask for: parts that a yaml names, with plain values. Nothing else is built, nor even imported.

A checkpoint holds the configuration that its model is built from, and a configuration names classes by their import
path (``_target_``), which Hydra imports and calls. From a stranger's file that would be a stranger's code. So a name in
a file counts only if a yaml of the same group has it: in the project's configs, or in a folder of the user's own, given
as ``--config-dir FOLDER`` on the command line or as ``directories=`` in Python. What a user composes needs no trust:
who may type a name may also run it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gsm import paths
from gsm.config.check import ConfigError

GROUPS = {
    "model": ("model", "size", "experiment"),
    "data": ("data", "experiment"),
}  # whose yamls may name what is built from a file's node
MEANT = {"_target_", "_partial_", "_convert_"}  # of Hydra's own keys
CHOICES: dict[str, tuple[Any, ...]] = {"_partial_": (True, False), "_convert_": ("none", "partial", "all")}
DEEPEST = 32  # mappings and lists in one another


def vetted(node: Any, part: str, directories: Sequence[Path] = ()) -> dict[str, Any]:
    """A node of a configuration that came from a file, once everything in it was found to be harmless.

    Args:
        node: what is to be built.
        part: what it is: ``model`` or ``data``.
        directories: folders of yaml files besides the project's and those of the command line.

    Raises:
        ConfigError: it names a part that no yaml names, or holds what is no plain value; the message says where.
    """
    folders = tuple(paths.config_folders(directories))
    known = _named(GROUPS[part], folders, paths.stamp(folders))
    if not isinstance(node, Mapping) or "_target_" not in node or "_partial_" in node:
        raise ConfigError(f"{part} is {_shown(node)}, but has to be a mapping with a _target_")
    for place, target in _targets(node, part, 0):
        if not (isinstance(target, str) and target in known):
            raise ConfigError(
                f"{place} names {_shown(target)}, but no yaml in {', '.join(GROUPS[part])} does, so it is not built: "
                "for a part of your own give the folder of its yaml, --config-dir FOLDER, or directories= in Python"
            )
    kept = node.get("cache_dir")
    if kept is not None and not _is_cache(kept):
        return {**node, "cache_dir": None}  # what is written goes where the user has it, not where a file says
    return dict(node)


def _is_cache(folder: Any) -> bool:
    """Whether a folder is a cache of ours already."""
    return isinstance(folder, str) and any(any(Path(folder).glob(name)) for name in ("tokens-*", "tokenizer-*.json"))


def _targets(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every ``_target_`` with its place. Raises ConfigError for whatever else is not plain."""
    if depth > DEEPEST:
        raise ConfigError(f"{place} is nested deeper than {DEEPEST} levels")
    if isinstance(value, Mapping):
        for key, below in value.items():
            if type(key) is not str:
                raise ConfigError(f"{place} has the key {_shown(key)}, which is no plain value")
            if key.startswith("_") and key not in MEANT:
                raise ConfigError(f"{place} has the key {_shown(key)}, which has no place in a file")
            if key in CHOICES and below not in CHOICES[key]:
                raise ConfigError(f"{place}.{key} is {_shown(below)}, but has to be one of {CHOICES[key]}")
            if key == "_target_":
                yield f"{place}._target_", below
            _refuse_interpolation(key, place)
            yield from _targets(below, f"{place}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            yield from _targets(below, f"{place}[{number}]", depth + 1)
    elif not (value is None or type(value) in (str, int, float, bool)):
        raise ConfigError(f"{place} is {_shown(value)}, which is no plain value")
    else:
        _refuse_interpolation(value, place)


def _refuse_interpolation(value: Any, place: str) -> None:
    """What a run saves is resolved; what would still be resolved here could read the environment."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ConfigError(f"{place} is {_shown(value)}, which a saved configuration does not hold")


@functools.lru_cache(maxsize=64)
def _named(groups: tuple[str, ...], folders: tuple[Path, ...], stamp: float) -> frozenset[str]:
    """Every ``_target_`` in the yamls of these groups; those are the user's own files, or the project's."""
    files = [file for folder in folders for group in groups for file in (folder / group).rglob("*.yaml")]
    return frozenset(name for file in files for name in _names(_content(file)))


def _content(file: Path) -> Any:
    """What a yaml holds; nothing, where it is none: Hydra says so when it is chosen."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None


def _names(value: Any) -> Iterator[str]:
    """The targets in a yaml's content, whatever else it holds."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if key == "_target_":
                yield str(below)
            yield from _names(below)
    elif isinstance(value, list):
        for below in value:
            yield from _names(below)


def _shown(value: Any) -> str:
    """A value in a sentence, cut short."""
    words = repr(value) if type(value) in (str, int, float, bool, type(None)) else f"a {type(value).__name__}"
    return words if len(words) < 80 else f"{words[:76]}..."
