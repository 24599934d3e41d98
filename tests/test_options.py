"""``--help`` lists every option, marks what is taken, and leaves out what only programs ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gsm import paths
from gsm.config import options
from gsm.config.options import groups_of, listing, scripts_of

GROUPS = groups_of([paths.configs()])


def said(script: str = "train", *folders: Path, **chosen: str) -> dict[str, dict[str, str]]:
    """Group -> option -> its lines, the star included."""
    found: dict[str, dict[str, str]] = {}
    group = option = ""
    for line in listing(script, [paths.configs(), *folders], chosen).splitlines():
        if line and line[0] not in " *":
            group = line
        elif line[2:3].strip():
            option = line[2:].split()[0]
            found.setdefault(group, {})[option] = line
        elif line:
            found[group][option] += " " + line.strip()
    return found


@pytest.mark.parametrize("group", sorted(group for group in GROUPS if scripts_of(group) == ["train"]))
def test_every_option_is_listed(group: str):
    names = {name for name in GROUPS[group] if not name.startswith(options.HIDDEN)}
    assert said().get(group, {}).keys() == (names if len(names) > 1 else set())


def test_a_star_is_before_what_is_chosen_and_nowhere_else():
    for chosen in ("gsm", "yoco"):
        starred = [name for name, line in said(model=chosen)["model"].items() if line.startswith("*")]
        assert starred == [chosen]


def test_an_option_of_ones_own_is_listed_too_and_one_with_an_underscore_is_not(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text("# Poems.\nname: x\n")
    (tmp_path / "data/_base.yaml").write_text("# What others are made of.\nname: x\n")
    shown = said("train", tmp_path)["data"]
    assert shown["mine"].split() == ["mine", "Poems."] and "_base" not in shown


def test_a_time_is_beside_what_takes_it(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\n# Why?\n# Two CPU cores take 3 hours.\na: b\n")
    assert said("train", tmp_path)["experiment"]["mine"].split() == ["mine", "Why?", "[3", "hours]"]
