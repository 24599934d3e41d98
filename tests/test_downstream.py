"""The paper's tables of downstream tasks, and intervals over their questions."""

from __future__ import annotations

import pytest
import torch

from gsm.evaluation import tasks
from gsm.evaluation.paper import published
from gsm.intervals import over_questions


@pytest.mark.parametrize("name", ["paper", "ablation"])
def test_the_papers_averages_are_those_of_its_rows(name: str):
    table = published(name)
    assert table and set(table.rows) <= set(tasks.known()) and len(table.average) == len(table.columns)
    for column, average in enumerate(table.average):
        values = [row["values"][column] for row in table.rows.values() if row["values"]]
        assert not values or sum(values) / len(values) == pytest.approx(average, abs=0.0051)


def test_the_bootstrap_finds_the_interval_that_drawing_questions_finds():
    drawn = torch.Generator().manual_seed(1)
    first = (torch.rand(200, generator=drawn) < 0.5).double()
    second = torch.where(torch.rand(200, generator=drawn) < 0.3, 1.0, first)
    found = over_questions({"a": first.tolist()}, {"a": second.tolist()})
    index = torch.randint(200, (10_000, 200), generator=drawn)
    low, high = (second - first)[index].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert found.difference == pytest.approx(float((second - first).mean()))
    assert found.low == pytest.approx(low, abs=0.006) and found.high == pytest.approx(high, abs=0.006)
    same = over_questions({"a": first.tolist()}, {"a": first.tolist()})
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)


def test_the_bootstrap_weighs_tasks_alike_and_refuses_other_questions():
    found = over_questions({"a": [0.0], "b": [0.0] * 99}, {"a": [1.0], "b": [0.0] * 99})
    assert found.difference == 0.5 and found.text() == "+50.00 [+50.00, +50.00]"
    with pytest.raises(ValueError, match="'a': 1.*'a': 2"):
        over_questions({"a": [0.0]}, {"a": [0.0, 1.0]})
