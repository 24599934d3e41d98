"""RULER side by side: the paper's tables from results of several arms and seeds, and of the retrieval ablation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gsm.config.load import digest
from gsm.evaluation import ruler
from gsm.evaluation.downstream import differences, grid, notes, values
from gsm.evaluation.paper import published, tables
from gsm.evaluation.results import by_arm
from gsm.evaluation.ruler import accuracy, averages
from gsm.evaluation.tasks import load

TASKS = ("niah_single_1", "niah_multikey_1")
SETTINGS = {"answers": "direct", "examples": 4, "seed": 42, "template": "short", "haystack": "h", "keys": "k"}


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
    lengths, paper, tasks, cells, apart = ruler.tables(arms, tables()["ruler"])
    assert lengths == [
        ["RULER, %", "160", "1K", "Avg."],
        ["direct", "100.00 +- 0.00", "75.00 +- 35.36", "87.50 +- 17.68"],
        ["cot", "100.00", "100.00", "100.00"],
    ]
    assert paper[1] == ["direct", "98.33", "100.00", "98.33", "100.00", "98.33", "99.00"]
    assert tasks[-1] == ["niah_multikey_1", "87.50 +- 17.68", "100.00", "97.00", "100.00"]
    assert ["direct, niah_single_1", "100.00 +- 0.00", "75.00 +- 35.36"] in cells
    assert [row[0] for row in apart] == ["minus direct, with 95 % interval", "Avg.", "at 1K", *TASKS]
    assert apart[1][1].startswith("+25.00 ["), "seed 0, which both have: half of the questions at one of two lengths"


def test_an_interval_is_of_paired_questions_and_cells_count_alike():
    first, second = everywhere(2, 4), everywhere(4, 4)
    found = ruler.apart({0: first}, {0: second}, lambda task, length: length == "160")
    assert found.startswith("+50.00 [") and ruler.apart({0: first}, {0: first}, lambda *_: True) == (
        "+0.00 [+0.00, +0.00]"
    )
    assert ruler.numbers(first) == {"average": 75.0, "longest": 100.0} and ruler.numbers(None) == {}


def test_what_was_asked_otherwise_is_not_compared_and_what_is_missing_is_said():
    one, other = everywhere(4, 4), everywhere(4, 4, seed=1, template="ruler")
    assert ruler.comparable([one, None, everywhere(0, 0, answers="cot", step=3)]) and not ruler.comparable([one, other])
    assert ruler.apart({0: one}, {0: other}, lambda *_: True) == "-"
    said = "\n".join(ruler.notes([one, other, None], ["a", "b", "c"]))
    assert "were not asked the same" in said and "RULER: nothing for c; ruler=true asks" in said
    assert "2 tasks at 160, 1K tokens (the paper: 4K to 64K), 4 examples of each, answers direct" in said
    assert "not as in the benchmark: haystack: h; template: short" in said
    chains = ruler.notes([everywhere(4, 4, answers="cot")], ["a"])
    assert "Chains of thought without 'Final answer:': 25.0 %." in chains


def scored(arm: str, seed: int, right: float, ruler: dict[str, Any] | None) -> dict[str, Any]:
    """A result of downstream tasks, of two questions each."""
    table = published("ablation")
    assert table
    samples = [{"subtask": "", "document": n, "acc": right, "acc_norm": right} for n in range(2)]
    each = {"scores": {"acc": right, "acc_norm": right, "samples": 2, "cut": 0}, "samples": samples}
    tasks = {task: {**each, "settings": {"documents": "hub", "limit": 0}} for task in table.rows}
    return {"experiment": "x", "arm": arm, "seed": seed, "mixture": False, "tasks": tasks, "ruler": ruler}


def test_the_retrieval_ablation_has_rulers_rows_beside_the_papers():
    table = published("ablation")
    assert table
    results = [
        scored("shared", 0, 0.5, everywhere(4, 2)),
        scored("separate", 0, 1.0, everywhere(4, 4, arm="separate", step=5)),
        scored("lost", 0, 1.0, None),
    ]
    tasks, arms = [load(name) for name in table.rows], by_arm(results)
    assert (values(results[0], table)["ruler_average"], values(results[0], table)["ruler_longest"]) == (75.0, 50.0)
    rows = {row[0]: row[1:] for row in grid(tasks, arms, table)}
    assert rows["task (%)"] == ["shared", "separate", "lost", "separate", "shared"]
    assert rows["Standard Avg."] == ["50.00", "100.00", "100.00", "64.92", "64.77"]
    assert rows["RULER Avg."] == ["75.00", "100.00", "-", "96.67", "94.33"]
    assert rows["RULER longest"] == ["50.00", "100.00", "-", "93.33", "93.33"]
    apart = {row[0]: row[1:] for row in differences(arms, table)[0]}
    assert apart["Standard Avg."][0].startswith("+50.00 [") and apart["RULER Avg."][0].startswith("+25.00 [")
    assert apart["RULER longest"][0].startswith("+50.00 [") and apart["RULER longest"][1] == "-"
    assert any("nothing for lost/seed0" in line for line in notes(arms, tasks, table))


def test_a_result_is_found_beside_its_checkpoint_or_in_the_phase_that_measured_it(tmp_path: Path):
    run = tmp_path / "logs/a/seed0"
    files = {phase: run / phase / "checkpoints/last.ckpt" for phase in ("train", "tune")}
    for phase, file in files.items():
        file.parent.mkdir(parents=True)
        torch.save({"weights of": phase}, file)
    assert ruler.known(files["tune"]) is None
    (run / "ruler").mkdir()
    result = everywhere(4, 2, checkpoint=digest(files["tune"]))
    (run / "ruler/ruler.json").write_text(json.dumps(result))
    assert ruler.known(files["tune"]) == result and ruler.known(files["train"]) is None
    (run / "tune/ruler.json").write_text(
        json.dumps({**result, "settings": {**result["settings"], "checkpoint": "another"}})
    )
    assert ruler.known(files["tune"]) is None, "of other weights"
    (run / "tune/ruler.json").write_text("{")
    assert ruler.known(files["tune"]) is None, "damaged"


def test_runs_side_by_side_leave_tables_and_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    results = [everywhere(4, 2), everywhere(4, 4, arm="b", answers="cot")]
    said = ruler.side_by_side_of(results, tmp_path / "ruler.json")
    assert any(line.split() == ["a", "100.00", "50.00", "75.00"] for line in said.splitlines())
    assert "| b | 100.00 | 100.00 | 100.00 |" in (tmp_path / "ruler.md").read_text()
    assert (tmp_path / "ruler.png").read_bytes().startswith(b"\x89PNG")
    other = [results[0], everywhere(4, 4, arm="c", seed=3, examples=5)]
    assert "were not asked the same" in ruler.side_by_side_of(other, tmp_path / "ruler.json")
