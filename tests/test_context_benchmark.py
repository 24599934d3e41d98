"""The benchmark of divided sequences: what it computes is what ranks do, and what it measures is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gsm_benchmarks import context


@pytest.mark.parametrize(("ranks", "one"), [(2, 1.5), (8, 1.875), (64, 1.984375)])
def test_two_pieces_make_searches_even(ranks: int, one: float):
    """With one piece of N, rank r searches 2 r + 1 parts of N^2, the last (2 N - 1) / N times the mean."""
    assert context.busiest(ranks, 1) == one
    assert context.busiest(ranks, 2) == 1


def test_everything_is_computed_measured_and_shown(tmp_path: Path):
    small = {"sizes": ["pico"], "contexts": [256], "ranks": [2], "searched": 64, "prompt": 64, "chunks": [32]}
    path = context.run(str(tmp_path / "context.json"), models=["gsm", "baseline"], size="pico", processes=[1], **small)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["ranks"], row["each"], len(row["seconds"])) for row in rows["even"]] == [(2, 1, 2), (2, 2, 2)]
    assert all(seconds > 0 for row in rows["even"] for seconds in row["seconds"])
    assert [(row["model"], row["tokens"], len(row["peaks"])) for row in rows["read"]] == [
        ("gsm", 64, 1),
        ("baseline", 64, 1),
    ]
    shown = path.with_suffix(".md").read_text()
    assert "| 2 | 1 | 1.50 |" in shown and "| 2 | 2 | 1.00 |" in shown and "64 tokens, float32" in shown


def test_pieces_that_cannot_be_alike_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="searched is 100, but has to be a multiple of 16"):
        context.run(str(tmp_path / "context.json"), ranks=[2, 8], searched=100)
