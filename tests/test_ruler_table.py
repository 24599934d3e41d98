"""RULER side by side: the paper's tables from results of several arms and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gsm.evaluation import ruler
from gsm.evaluation.paper import tables
from gsm.evaluation.ruler import accuracy, averages

TASKS = ("niah_single_1", "niah_multikey_1")
SETTINGS = {"answers": "direct", "examples": 4, "seed": 42, "template": "short", "haystack": "h", "keys": "k"}
SETTINGS |= {"sentences": "punkt"}


def made(right: dict[str, int], arm: str = "a", seed: int = 0, **settings: Any) -> dict[str, Any]:
    """A result in which so many of 4 questions of each cell (`task/length`) are answered, the first ones."""
    cells = {}
    for name, count in right.items():
        task, length = name.split("/")
        samples = [{"index": i, "score": float(i < count), "marked": True} for i in range(4)]
        cells[name] = {"task": task, "length": int(length), "accuracy": accuracy(samples), "samples": samples}
    run = {"name": "logs", "arm": arm, "seed": str(seed)}
    head = {"settings": {**SETTINGS, "run": run, "step": 9, "checkpoint": seed, **settings}, "cells": cells}
    return {**head, "asked": list(cells), "averages": averages(cells.values()), "unmarked": 0.25}


def everywhere(short: int, long: int, **options: Any) -> dict[str, Any]:
    return made({f"{task}/{n}": count for task in TASKS for n, count in ((160, short), (1024, long))}, **options)


def test_the_papers_averages_are_those_of_its_lengths_and_tasks():
    paper = tables()["ruler"]
    for column in range(len(paper["columns"])):
        for each in (paper["by_length"], paper["by_task"]):
            mean = sum(row[column] for row in each.values()) / len(each)
            assert mean == pytest.approx(paper["average"][column], abs=0.0051)


def test_arms_become_the_papers_tables_with_means_and_spreads_over_seeds():
    arms = {
        "direct": {0: everywhere(4, 2), 1: everywhere(4, 4, seed=1)},
        "cot": {0: everywhere(4, 4, arm="cot", answers="cot")},
    }
    lengths, tasks, apart = ruler.tables(arms, tables()["ruler"])
    assert lengths == [
        ["length, %", "direct", "cot", "paper: direct", "paper: cot"],
        ["160", "100.00 +- 0.00", "100.00", "-", "-"],
        ["1K", "75.00 +- 35.36", "100.00", "-", "-"],
        ["Avg.", "87.50 +- 17.68", "100.00", "99.00", "100.00"],
    ]
    assert tasks[-1] == ["niah_multikey_1", "87.50 +- 17.68", "100.00", "97.00", "100.00"]
    assert [row[0] for row in apart] == ["minus direct, with 95 % interval", "Avg.", *TASKS]
    assert apart[1][1].startswith("+25.00 ["), "seed 0, which both have: half of the questions at one of two lengths"


def test_an_interval_is_of_paired_questions_and_cells_count_alike():
    first, second = everywhere(2, 4), everywhere(4, 4)
    assert ruler.apart({0: first}, {0: second}, TASKS).startswith("+25.00 [")
    assert ruler.apart({0: first}, {0: first}, TASKS[:1]) == "+0.00 [+0.00, +0.00]"


def test_other_questions_are_not_compared():
    first, second = everywhere(4, 4), everywhere(4, 4, seed=1, template="ruler")
    assert ruler.comparable([first, everywhere(0, 0, answers="cot", step=3)]) and not ruler.comparable([first, second])
    assert ruler.apart({0: first}, {0: second}, TASKS) == "-"
    lines = "\n".join(ruler.notes([first, everywhere(4, 4, answers="cot", template="ruler")]))
    assert "had other questions" in lines and "in the benchmark: haystack: h; template: short; keys: k." in lines
    assert "Chains of thought without 'Final answer:': 25.0 %." in lines


def test_runs_side_by_side_leave_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    results = [everywhere(4, 2), everywhere(4, 4, arm="b", answers="cot")]
    ruler.Ruler().conclude(results, tmp_path / "ruler.json")
    assert "1K          50.00  100.00" in capsys.readouterr().out
    assert "| 1K | 50.00 | 100.00 | - | - |" in (tmp_path / "ruler.md").read_text()
    assert (tmp_path / "ruler.png").read_bytes().startswith(b"\x89PNG")
    ruler.Ruler().conclude([results[0], everywhere(4, 4, arm="c", examples=5)], tmp_path / "ruler.json")
    assert "had other questions" in capsys.readouterr().out
