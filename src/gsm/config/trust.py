"""The parts that a file may ask for: those that a yaml names, with plain values. Nothing else is built or imported.

A checkpoint holds the configuration of its model, and a configuration names classes by their import path
(``_target_``), which Hydra imports and calls. In a stranger's file that would be a stranger's code. So a name in a file
counts only if a yaml of the same group has it: in the project's configs, or in a folder of the user's own, given as
``--config-dir FOLDER`` on the command line or as ``directories=`` in Python. A user's own overrides need no trust: who
may type a name may also run it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.options import content

# The config groups whose yamls may name the parts of a file's model, and of its data.
GROUPS = {"model": ("model", "size", "experiment"), "data": ("data", "experiment")}
# Keys of Hydra that a file may have, and their values (None: any that a yaml names).
HYDRA = {"_target_": None, "_partial_": (True, False), "_convert_": ("none", "partial", "all")}
DEEPEST = 32  # mappings and lists in one another


def vetted(node: Any, part: str, directories: Sequence[Path] = ()) -> dict[str, Any]:
    """Return a node of a file's configuration, if everything in it is harmless.

    Args:
        node: the configuration of the part.
        part: ``model`` or ``data``.
        directories: folders of yaml files, beside the project's and those of the command line.

    Raises:
        ConfigError: it names a part that no yaml names, or holds a value that is not plain; with the place.
    """
    folders = tuple(paths.config_folders(directories))
    if not isinstance(node, Mapping) or "_target_" not in node or "_partial_" in node:
        raise ConfigError(f"{part} must be a mapping with a _target_, got {_shown(node)}")
    _check(node, part, GROUPS[part], _named(GROUPS[part], folders, paths.digest(folders)))
    cache = node.get("cache_dir")
    if cache is not None and not _is_cache(cache):
        return {**node, "cache_dir": None}  # a file does not choose the folder that is written to
    return dict(node)


def _check(value: Any, place: str, groups: tuple[str, ...], known: frozenset[str], depth: int = 0) -> None:
    """Raise ConfigError unless a value is made of mappings, lists and plain values, and names known parts alone."""
    if depth > DEEPEST:
        raise ConfigError(f"{place} must be nested at most {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        for key, below in value.items():
            if type(key) is not str:
                raise ConfigError(f"{place} must have keys of type str, got {_shown(key)}")
            if key.startswith("_") and key not in HYDRA:
                raise ConfigError(f"{place} must have no keys of Hydra but {', '.join(HYDRA)}, got {_shown(key)}")
            choices = HYDRA.get(key)
            if choices is not None and below not in choices:
                raise ConfigError(f"{place}.{key} must be one of {choices}, got {_shown(below)}")
            if key == "_target_" and not (isinstance(below, str) and below in known):
                raise ConfigError(
                    f"{place}.{key} must be named by a yaml in {', '.join(groups)}, got {_shown(below)}. For a part of "
                    "your own set GSM_CONFIGS to the folder of its yaml, or give a command --config-dir FOLDER"
                )
            _check(key, place, groups, known, depth)
            _check(below, f"{place}.{key}", groups, known, depth + 1)
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            _check(below, f"{place}[{number}]", groups, known, depth + 1)
    elif not (value is None or type(value) in (str, int, float, bool)):
        raise ConfigError(f"{place} must be a plain value, got {_shown(value)}")
    elif isinstance(value, str) and ("${" in value or value == "???"):  # resolving it could read the environment
        raise ConfigError(f"{place} must be a resolved value, got {_shown(value)}")


def _is_cache(folder: Any) -> bool:
    """Return whether a folder is a cache of this project already."""
    return isinstance(folder, str) and any(any(Path(folder).glob(name)) for name in ("tokens-*", "tokenizer-*.json"))


@functools.lru_cache(maxsize=64)
def _named(groups: tuple[str, ...], folders: tuple[Path, ...], digest: str) -> frozenset[str]:
    """Return every ``_target_`` in the yamls of these groups."""
    files = [file for folder in folders for group in groups for file in paths.yamls(folder / group)]
    return frozenset(name for file in files for name in _targets(content(file)))


def _targets(value: Any) -> Iterator[str]:
    """Yield the targets in the content of a yaml."""
    if isinstance(value, Mapping):
        yield from (str(below) for key, below in value.items() if key == "_target_")
    if isinstance(value, Mapping | list):
        for below in value.values() if isinstance(value, Mapping) else value:
            yield from _targets(below)


def _shown(value: Any) -> str:
    """Return a value for a sentence, cut short."""
    words = repr(value) if type(value) in (str, int, float, bool, type(None)) else f"a {type(value).__name__}"
    return words if len(words) < 80 else f"{words[:76]}..."
