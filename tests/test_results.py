"""What is measured is kept cell by cell, gone on from, and never mixed with what was measured otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gsm.evaluation import results as kept
from gsm.evaluation.results import Results, by_arm, difference, side_by_side
from gsm.intervals import over_seeds


def squares(numbers: range, path: Path, progress: Any = kept.silent, **settings: Any) -> tuple[Results, list[int]]:
    """The squares of numbers, computed in pairs, and the numbers that were computed now."""
    found, computed = Results(path, {"of": "squares", **settings}), []

    def compute(pair: tuple[int, ...]) -> dict[str, int]:
        computed.extend(pair)
        return {str(number): number**2 for number in pair}

    pairs = [tuple(numbers[first : first + 2]) for first in range(0, len(numbers), 2)]
    found.fill(pairs, lambda pair: map(str, pair), compute, progress)
    return found, computed


@pytest.mark.parametrize("every", [0.0, 1000.0])
def test_an_interrupted_measure_goes_on_with_what_is_missing(
    tmp_path: Path, every: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kept, "SAVE_EVERY", every)

    def interrupted(parts: list[Any], count: int, note: str) -> Iterator[Any]:
        assert count == len(parts) == 3
        yield from parts[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        squares(range(6), tmp_path / "a.json", interrupted)
    assert json.loads((tmp_path / "a.json").read_text())["cells"] == {"0": 0, "1": 1, "2": 4, "3": 9}
    found, computed = squares(range(8), tmp_path / "a.json")
    assert computed == [4, 5, 6, 7] and found.cells["7"] == 49
    found.save(sum=140)
    assert json.loads((tmp_path / "a.json").read_text())["sum"] == 140


def test_a_measure_that_is_refused_leaves_the_results_before_it_where_they_are(tmp_path: Path):
    squares(range(2), tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()
    results = Results(tmp_path / "a.json", {"of": "cubes"})
    with pytest.raises(ZeroDivisionError):
        results.fill([0], lambda part: [part], lambda part: {part: 1 / part})
    assert (tmp_path / "a.json").read_bytes() == before and not (tmp_path / "a.previous").exists()


@pytest.mark.parametrize("settings", [{"of": "cubes"}, {"further": [1]}])
def test_a_file_of_other_settings_is_moved_aside_and_that_is_said(
    tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    squares(range(2), tmp_path / "a.json")
    _, computed = squares(range(2), tmp_path / "a.json", **settings)
    said = capsys.readouterr().out
    assert said.startswith(f"a.json begins again: it was made with another {next(iter(settings))}; the old one is now")
    assert computed == [0, 1] and json.loads((tmp_path / "a.previous").read_text())["settings"] == {"of": "squares"}
    squares(range(2), tmp_path / "a.json", **settings)
    assert capsys.readouterr().out == "", "what comes back from JSON is the same"
    squares(range(2), tmp_path / "a.json")
    assert f"another {next(iter(settings))};" in capsys.readouterr().out, "also what is there no more"


def test_without_a_file_nothing_is_kept(tmp_path: Path):
    found = Results(None, {"a": (1, 2)})
    found.fill([1], lambda part: [part], lambda part: {part: "x"})
    assert found.content() == {"settings": {"a": [1, 2]}, "cells": {1: "x"}} and not any(tmp_path.iterdir())


def test_arms_are_put_side_by_side_over_their_seeds():
    runs = [
        {"experiment": "e", "arm": arm, "seed": seed, "n": n}
        for arm, seed, n in (("a", 0, 1), ("b", 0, 4), ("a", 1, 3))
    ]
    arms = by_arm([*runs, {**runs[0], "n": 2}])
    assert [len(seeds) for seeds in arms.values()] == [3, 1], "a second run of a seed counts too"
    grid = side_by_side("x", arms, {"n": "N", "m": "M"}, lambda run, name: run.get(name), ["theirs"], {"n": [9]})
    assert grid == [["x", "a", "b", "theirs"], ["N", "2.00 +- 1.00", "4.00", "9.00"], ["M", "-", "-", "-"]]
    assert over_seeds([None, 1.25]).text(1) == "1.2"
    assert list(by_arm([runs[0], {**runs[1], "experiment": "f"}])) == ["e/a", "f/b"]
    scores = lambda results: {"task": [float(result["n"]) for result in results]}  # noqa: E731
    assert difference(arms["a"], arms["b"], scores) == "+300.00 [+300.00, +300.00]", "the seed that both have"
    assert difference({1: runs[2]}, {0: runs[1]}, scores) == "-"
    assert difference(arms["a"], arms["b"], scores, lambda results: False) == "-"
