"""RULER side by side: the paper's tables from the records of several arms and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gsm.config.check import ConfigError
from gsm.evaluation.paper import tables
from gsm.evaluation.records import Measured, by_arm
from gsm.evaluation.ruler import Ruler

TASKS = ("niah_single_1", "niah_multikey_1")
QUESTIONS = {"examples": 4, "seed": 42, "template": "short", "haystack": "h", "keys": "k", "sentences": "punkt"}


def run(short: int, long: int, arm: str = "a", seed: int = 0, answers: str = "direct", **questions: Any) -> Measured:
    """A run that answers so many of 4 questions of each task at two lengths, the first ones."""
    records = [
        {
            **{"task": task, "length": length, "index": i, "marked": i > 0},
            **{"quantity": "score", "value": float(i < count), "weight": 1},
        }
        for task in TASKS
        for length, count in ((160, short), (1024, long))
        for i in range(4)
    ]
    settings = {"model": {"answers": answers}, "questions": {**QUESTIONS, **questions}}
    return Measured(settings, {"experiment": "logs", "arm": arm, "seed": seed}, records)


def test_the_papers_averages_are_those_of_its_lengths_and_tasks():
    paper = tables()["ruler"]
    for column in range(len(paper["columns"])):
        for each in (paper["by_length"], paper["by_task"]):
            mean = sum(row[column] for row in each.values()) / len(each)
            assert mean == pytest.approx(paper["average"][column], abs=0.0051)


def test_arms_become_the_papers_tables_with_means_and_spreads_over_seeds():
    arms = by_arm([run(4, 2), run(4, 4, seed=1), run(4, 4, "cot", answers="cot")])
    lengths, tasks, apart = Ruler().tables(arms)
    assert lengths == [
        ["length, %", "a", "cot", "paper: direct", "paper: cot"],
        ["160", "100.00 +- 0.00", "100.00", "-", "-"],
        ["1K", "75.00 +- 35.36", "100.00", "-", "-"],
        ["Avg.", "87.50 +- 17.68", "100.00", "99.00", "100.00"],
    ]
    assert tasks[-1] == ["niah_multikey_1", "87.50 +- 17.68", "100.00", "97.00", "100.00"]
    assert [row[0] for row in apart] == ["minus a, with 95 % interval", "Avg.", *TASKS]
    assert apart[1][1].startswith("+25.00 ["), "seed 0, which both have: half of the questions at one of two lengths"
    note = "\n".join(Ruler().notes(arms))
    assert "haystack: h; template: short; keys: k" in note and "25.0 %" in note


def test_the_average_of_a_task_and_a_length_is_unweighted():
    one = run(2, 4)
    one.records[:1] = []  # a task with fewer questions at a length counts as the others do
    metrics = Ruler().metrics(one)
    assert metrics["160"] == pytest.approx(100 * (1 / 3 + 2 / 4) / 2)
    assert metrics["average"] == pytest.approx((metrics["160"] + metrics["1024"]) / 2)
    assert metrics["niah_single_1"] == pytest.approx(100 * (1 / 3 + 1) / 2)


def test_runs_side_by_side_leave_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    first = run(4, 2)
    Ruler().conclude([first, run(4, 4, "b", answers="cot")], tmp_path / "ruler")
    assert "1K          50.00  100.00" in capsys.readouterr().out
    assert "| 1K | 50.00 | 100.00 | - | - |" in (tmp_path / "ruler.md").read_text()
    assert (tmp_path / "ruler.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="examples"):
        Ruler().conclude([first, run(4, 4, "c", examples=5)], tmp_path / "ruler")


@pytest.mark.parametrize(("key", "value"), [("length", 1024), ("task", TASKS[1])])
def test_runs_that_were_asked_other_lengths_or_tasks_are_not_set_side_by_side(key: str, value: Any):
    fewer = run(4, 2)
    fewer.records = [record for record in fewer.records if record[key] != value]
    for runs in ([fewer, run(4, 4, "b")], [run(4, 4, "b"), fewer]):
        with pytest.raises(ConfigError, match=rf"^ruler\.{key}s "):
            Ruler().check(runs)
