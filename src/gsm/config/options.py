"""The choices of the command line, for ``--help`` and the documentation: every option, with the first comment of its
yaml."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from gsm import paths
from gsm.errors import ConfigError
from gsm.files import DAMAGED, read_text

WIDTH = 118
SENTENCE = re.compile(r".*?(?<! al)[.?](?= |$)")
TIME = re.compile(r"(?:Two CPU cores take|One CPU core takes) (.*?)[.;](?= |$)")
HIDDEN = "_"  # begins the name of a yaml that others are made of, or that a program asks for


def groups_of(folders: Sequence[Path]) -> dict[str, set[str]]:
    """Return every group with its options: the folders below those of yamls, and the files in them."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for file in paths.yamls(folder):
            group = file.parent.relative_to(folder).as_posix()
            if group.split("/")[0] not in (".", "hydra"):
                groups.setdefault(group, set()).add(file.stem)
    return groups


def scripts_of(group: str) -> list[str]:
    """Return the scripts whose yamls have a group, or one above it, in their lists of defaults."""
    return [file.stem for file in sorted(paths.configs().glob("*.yaml")) if group.split("/")[0] in parts(file)]


def parts(file: Path) -> set[str]:
    """Return the groups in a yaml's list of defaults, and in those of the yamls beside it that it builds on."""
    files, groups = [file], set[str]()
    for yaml_file in files:  # grows
        defaults = mapping(yaml_file).get("defaults")
        for line in defaults if isinstance(defaults, list) else ():
            if isinstance(line, Mapping):
                groups |= {str(key) for key in line}
            elif (base := file.with_name(f"{line}.yaml")) not in files:
                files.append(base)
    return groups


def content(file: Path) -> Any:
    """Return the content of a yaml; None where it cannot be read."""
    try:
        return yaml.load(read_text(file), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, OSError, RecursionError):
        return None


def saved(file: Path) -> Any:
    """Return the content of a yaml that Hydra has written beside a run; None where there is none.

    Raises ConfigError for a damaged one.
    """
    try:
        return yaml.load(read_text(file), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise ConfigError(DAMAGED.format(file, f"{' '.join(str(error).split()):.200}")) from error


def mapping(file: Path) -> Mapping[str, Any]:
    """Return the content of a yaml of keys; empty for any other."""
    keys = content(file)
    return keys if isinstance(keys, Mapping) else {}


def reference(script: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return every key that a script's configuration may have, from its yaml and from all yamls of its groups.

    A key has the unresolved value of one yaml that sets it.
    """
    script_yaml = paths.configs() / f"{script}.yaml"
    keys = {key: value for key, value in mapping(script_yaml).items() if key not in ("defaults", "hydra")}
    for group in parts(script_yaml) - {"experiment"}:
        if not group.startswith("override "):
            files = [file for folder in folders for file in sorted((folder / group).glob("*.yaml"))]
            keys[group] = functools.reduce(_merged, map(mapping, files), {})
            keys[group].pop("defaults", None)
    return keys


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both mappings, and of the mappings in them."""
    both = [key for key in second if isinstance(first.get(key), Mapping) and isinstance(second[key], Mapping)]
    return {**first, **second, **{key: _merged(first[key], second[key]) for key in both}}


def listing(script: str, folders: Sequence[Path], chosen: Mapping[str, str | None]) -> str:
    """Return the groups that a script takes, each option with its first sentence, and a star before each choice."""
    lines: list[str] = []
    for group, names in sorted(groups_of(folders).items()):
        shown = sorted(name for name in names if not name.startswith(HIDDEN))
        if script not in scripts_of(group) or len(shown) < 2:  # where there is one, nothing can be chosen
            continue
        width = max(map(len, shown))
        lines += ["", group]
        for name in shown:
            begin = f"{'*' if chosen.get(group) == name else ' '} {name:<{width}}  "
            file = next(file for folder in reversed(folders) if (file := folder / group / f"{name}.yaml").is_file())
            text, time = opening(file.read_text(encoding="utf-8", errors="replace"))
            first = SENTENCE.match(text)
            shown = " ".join([first[0] if first else text, *([f"[{time}]"] if time else [])])
            lines += textwrap.wrap(begin + shown, WIDTH, subsequent_indent=" " * len(begin), break_on_hyphens=False)
    return "\n".join(lines[1:])


def opening(text: str) -> tuple[str, str]:
    """Return the first paragraph of the comment that a yaml opens with, in one line, and its time on a CPU.

    The paragraph ends before the time. Without a time, the second text is empty.
    """
    lines = (line for line in text.splitlines() if not line.startswith("# @package"))
    paragraph = " ".join(line[2:].strip() for line in takewhile(lambda line: line.startswith("# "), lines))
    before, *time = TIME.split(paragraph)
    return before.strip(), time[0] if time else ""
