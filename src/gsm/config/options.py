"""What can be chosen, for ``--help`` and the documentation: every option, with what its yaml opens with."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gsm import paths

WIDTH = 118
SENTENCE = re.compile(r".*?(?<! al)[.?](?= |$)")
TIME = re.compile(r"Two CPU cores take (.*?)\.")
HIDDEN = "_"  # begins the name of a yaml that others are made of, or that a program asks for


def groups_of(folders: Sequence[Path]) -> dict[str, set[str]]:
    """Every group with its options: the folders below those of yamls, and the files in them."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.rglob("*.yaml"):
            group = file.parent.relative_to(folder).as_posix()
            if group.split("/")[0] not in (".", "hydra"):
                found.setdefault(group, set()).add(file.stem)
    return found


def scripts_of(group: str) -> list[str]:
    """The scripts whose yamls have a group, or one above it, in their lists of defaults."""
    return [script for script, groups in _taken(paths.configs()).items() if group.split("/")[0] in groups]


@functools.cache
def _taken(folder: Path) -> dict[str, set[str]]:
    """The groups of every script's list of defaults, read once: each override of a group asks for them."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        config: Any = OmegaConf.load(file)
        found[file.stem] = {str(key) for one in config["defaults"] if not isinstance(one, str) for key in one}
    return found


def listing(script: str, folders: Sequence[Path], chosen: Mapping[str, str | None]) -> str:
    """The groups that a script takes, and each option with what it asks or is; a star is before what is chosen."""
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
            said = _short(opening(file.read_text()))
            lines += textwrap.wrap(begin + said, WIDTH, subsequent_indent=" " * len(begin), break_on_hyphens=False)
    return "\n".join(lines[1:])


def opening(yaml: str) -> str:
    """The first paragraph of the comment that a yaml opens with, in one line."""
    lines = (line for line in yaml.splitlines() if not line.startswith("# @package"))
    return " ".join(line[2:].strip() for line in takewhile(lambda line: line.startswith("# "), lines))


def _short(paragraph: str) -> str:
    """Its first sentence, and how long it takes, if it says that."""
    first, time = SENTENCE.match(paragraph), TIME.search(paragraph)
    return " ".join([first[0] if first else paragraph, *([f"[{time[1]}]"] if time else [])])
