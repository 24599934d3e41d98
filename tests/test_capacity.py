"""Capacity: the needles and questions of each load, its fit into a sequence, and the count of answers by load."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from short_runs import SIZES
from small import SHALLOW, build

from gsm import plots
from gsm.config.compose import compose
from gsm.data.capacity import Capacity, Load
from gsm.data.synthetic import Generated
from gsm.evaluation import questions
from gsm.training.run import train

LOADS = {"find": [1, 8, 16], "wait": [1, 8, 32], "count": [3, 12]}
TASK = Capacity(loads=LOADS, keys=20, values=9, fillers=5, asked=4, needles=6, gap=10)
LENGTH = 96
EACH = pytest.mark.parametrize("load", TASK.each(), ids=str)


def sequences(task: Capacity, length: int = LENGTH, count: int = 40, whole: int | None = None):
    return [task.draw(np.random.default_rng([5, i]), length, whole) for i in range(count)]


def pairs(token_T: np.ndarray, until: int) -> list[tuple[int, int]]:
    """Return the keys before a place, each with the token after it."""
    return [(int(token_T[i]), int(token_T[i + 1])) for i in range(until) if token_T[i] < TASK.keys]


def first_question(drawn) -> int:
    """Return the place of the first question's key: answers end the sequence, at equal distances."""
    due = np.flatnonzero(drawn.target_T >= 0)
    each = due[1] - due[0] if len(due) > 1 else None
    marks = np.flatnonzero(drawn.token_T == TASK.vocabulary - 1)
    if each is None:
        each = 2 if not len(marks) else 2 + due[0] - np.flatnonzero(drawn.token_T[: due[0]] < TASK.keys)[-1]
    return LENGTH - each * len(due)


@EACH
def test_the_answer_is_the_most_frequent_value_of_the_key(load: Load):
    for drawn in sequences(TASK.only(load)):
        start, values = first_question(drawn), {}
        for key, value in pairs(drawn.token_T, start):
            values.setdefault(key, Counter())[value] += 1
        wait = load.amount if load.kind == "wait" else 0
        for due in np.flatnonzero(drawn.target_T >= 0):
            key = int(drawn.token_T[due - wait])
            (value, times), *less_frequent = values[key].most_common()
            assert drawn.target_T[due] == drawn.token_T[due + 1] == value
            if load.kind == "count":
                assert (times, [n for _, n in less_frequent]) == (2 * load.amount // 3, [load.amount // 3])
            else:
                assert times == 1 and not less_frequent


@EACH
def test_a_sequence_has_the_needles_of_its_load(load: Load):
    for drawn in sequences(TASK.only(load)):
        keys = [key for key, _ in pairs(drawn.token_T, first_question(drawn))]
        if load.kind == "count":
            assert set(Counter(keys).values()) == {load.amount} and len(set(keys)) == min(4, 12 // load.amount)
        else:
            assert len(keys) == len(set(keys)) == (load.amount if load.kind == "find" else TASK.needles)


@EACH
def test_a_gap_lies_before_the_questions_and_the_last_answer_ends_the_sequence(load: Load):
    for drawn in sequences(TASK.only(load)):
        start = first_question(drawn)
        assert (drawn.token_T[start - TASK.gap : start] >= TASK.keys + TASK.values).all()
        assert drawn.target_T[-2] == drawn.token_T[-1] and drawn.target_T[-1] == -100
        assert 1 <= (drawn.target_T >= 0).sum() <= TASK.asked


def test_only_an_answer_that_waits_has_a_mark_and_it_stands_where_the_answer_is_due():
    mark = TASK.vocabulary - 1
    for load in TASK.each():
        for drawn in sequences(TASK.only(load), count=10):
            marks = np.flatnonzero(drawn.token_T == mark)
            assert marks.tolist() == (np.flatnonzero(drawn.target_T >= 0).tolist() if load.kind == "wait" else [])
            assert drawn.token_T.max() <= mark


def test_kinds_come_equally_often_and_every_load_comes():
    mixed = sequences(TASK, count=300)
    with_mark = sum(bool((drawn.token_T == TASK.vocabulary - 1).any()) for drawn in mixed)
    assert 70 < with_mark < 130
    needles = {len(pairs(drawn.token_T, LENGTH - 1)) - int((drawn.target_T >= 0).sum()) for drawn in mixed}
    assert {1, 6, 8, 12, 16} == needles


def test_a_short_sequence_has_the_loads_that_fit():
    assert TASK.least == max(2 * 1 + 2, 2 * 6 + 2 + 1, 2 * 3 + 2)
    for drawn in sequences(TASK, TASK.least, whole=LENGTH):
        assert len(drawn.token_T) == TASK.least and (drawn.target_T >= 0).any()


class Knows(torch.nn.Module):
    """A model that answers with the next token; it is wrong in sequences with a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("transformer", geometry=SHALLOW)
        self.embedding, self.evaluating = self.model.embedding, self.model.evaluating

    def forward(self, token_BT: torch.Tensor):
        answer_BT = token_BT.roll(-1, 1)
        answer_BT[(token_BT == TASK.vocabulary - 1).any(1)] = TASK.vocabulary - 1
        return type("Output", (), {"logits": torch.nn.functional.one_hot(answer_BT, TASK.vocabulary)})


def test_answers_are_counted_by_load():
    model: Any = Knows()
    shares = {kind: questions.measure(model, tasks, LENGTH, sequences=5) for kind, tasks in TASK.apart().items()}
    assert shares == {"find": {"1": 1, "8": 1, "16": 1}, "wait": {"1": 0, "8": 0, "32": 0}, "count": {"3": 1, "12": 1}}
    lines = questions.grid(shares)
    assert lines[0].split() == ["answered,", "%", "1", "3", "8", "12", "16", "32"]
    assert lines[2].split() == ["wait", "0.0", "0.0", "0.0"]


def test_a_load_is_measured_with_sequences_of_its_own_that_are_always_the_same():
    first, second = (Generated(TASK.only(Load("find", 8)), 7, lambda _: LENGTH)[3] for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)


def test_a_run_writes_what_it_answers_under_each_load(tmp_path):
    words = ["experiment=capacity", "arms=null", "seeds=null", f"logs={tmp_path}", *SIZES]
    words += ["trainer=cpu", "trainer.max_steps=2", "trainer.val_check_interval=2", "optimizer.warmup_steps=1"]
    words += ["size.context=64", "data.shortest=null", "data.validation_sequences=2", "data.task.gap=4"]
    words += ["data.task.loads={find: [1, 4], wait: [2], count: [3]}", "data.task.keys=16", "size.vocabulary=65"]
    facts = train(compose(words))
    assert facts["by_length"] is None
    assert {kind: set(shares) for kind, shares in facts["by_load"].items()} == {
        "find": {"1", "4"}, "wait": {"2"}, "count": {"3"}
    }  # fmt: skip


def test_cells_show_the_mean_over_seeds_and_nothing_where_nothing_was_measured():
    pytest.importorskip("matplotlib")
    figure, panels = plots.figure(2, grid=False)
    tasks = {"find": {"a": [{1: 0.5, 4: 0.0}, {1: 1.0, 4: 0.5}], "b": [{1: 1.0}]}, "wait": {"a": [], "b": [{2: 0.25}]}}
    plots.cells(panels, tasks, "load", "answered")
    texts = [[text.get_text() for text in axes.texts] for axes in panels]
    assert texts == [["0.75", "0.25", "1.00"], ["0.25"]]
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == ["a", "b"]
    plots.png(figure)
