"""Downstream tasks without the harness: log-likelihoods with shared contexts, the paper's tables, intervals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bag import Bag
from small import GEOMETRY, MEMORIES, SHALLOW, build

from gsm.evaluation import tasks
from gsm.evaluation.loglikelihood import loglikelihoods, plan
from gsm.evaluation.paper import published
from gsm.intervals import over_questions


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(GEOMETRY.vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_pairs() -> list[tuple[list[int], list[int]]]:
    """Three questions with three choices, one with a single one, and two with contexts of a token."""
    pairs = [(ids(length, 1), ids(n, 10 * length + n)) for length in (9, 30, 31) for n in (1, 4, 2)]
    return [*pairs, (ids(17, 2), ids(5, 3)), (ids(1, 4), ids(7, 5)), (ids(1, 4), ids(3, 6))]


def one_by_one(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """From a single forward over everything."""
    with torch.no_grad():
        logprob_TV = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    target_T = torch.tensor(continuation)
    return float(logprob_TV.gather(1, target_T[:, None]).sum()), bool((logprob_TV.argmax(-1) == target_T).all())


@pytest.mark.parametrize("case", MEMORIES)
def test_a_shared_context_changes_no_loglikelihood(case: str):
    model, pairs = build(case, geometry=SHALLOW), [(ids(length, 1), ids(n, n)) for length in (9, 30) for n in (1, 4)]
    found = loglikelihoods(model, pairs, max_length=100, rows=7)
    for score, pair in zip(found, pairs, strict=True):
        want, greedy = one_by_one(model, *pair)
        assert score.loglikelihood == pytest.approx(want, abs=1e-9) and score.greedy == greedy and score.cut == 0


def test_questions_of_all_shapes_keep_their_places():
    model, pairs = Bag(), some_pairs()
    for rows in (1, 2, 7):
        for score, pair in zip(loglikelihoods(model, pairs, max_length=100, rows=rows), pairs, strict=True):
            assert score.loglikelihood == pytest.approx(one_by_one(model, *pair)[0], abs=1e-9)


def test_a_model_that_diverged_answers_nothing():
    """Each of its NaNs was taken for the likeliest of all choices."""
    model = build("gsm", geometry=SHALLOW)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="log-probabilities"):
        loglikelihoods(model, [(ids(9, 1), ids(4, 1))], max_length=100)


def test_greedy_is_what_the_model_would_write():
    model, context, best = Bag(), ids(20, 1), []
    for _ in range(4):
        best.append(int(model(torch.tensor([context + best])).logits[0, -1].argmax()))
    found = loglikelihoods(model, [(context, best), (context, [*best[:3], best[3] + 1])], max_length=100)
    assert [score.greedy for score in found] == [True, False]


def test_a_context_is_read_once_for_all_its_choices():
    model = Bag()
    loglikelihoods(model, [(ids(30, 1), ids(4, n)) for n in range(5)], max_length=100)
    assert model.read == 30 + 5 * 3, "the last token of a choice is not read at all"


def test_what_is_too_long_is_cut_on_the_left_and_counted():
    model, context = Bag(), ids(30, 1)
    pairs = [(context, ids(n, n)) for n in (1, 4)]
    found = loglikelihoods(model, pairs, max_length=20)
    assert [score.cut for score in found] == [30 - 20, 30 - 17]
    for score, (_, choice) in zip(found, pairs, strict=True):
        assert score.loglikelihood == pytest.approx(one_by_one(model, context[score.cut :], choice)[0], abs=1e-9)


def test_long_continuations_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch):
    model, pairs = Bag(), some_pairs()
    want = loglikelihoods(model, pairs, max_length=100)
    monkeypatch.setattr("gsm.evaluation.loglikelihood.SCRATCH", 257 * 4)
    for one, other in zip(loglikelihoods(model, pairs, max_length=100), want, strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-9)


def test_a_continuation_that_is_too_long_is_scored_as_a_whole():
    model, context, text = Bag(), ids(30, 1), ids(25, 2)
    (score,) = loglikelihoods(model, [(context, text)], max_length=20)
    assert score.cut == 29 and score.loglikelihood == pytest.approx(one_by_one(model, context[-1:], text)[0], abs=1e-9)


def test_a_pair_that_cannot_be_scored_is_named():
    for pair in (([], [1]), ([1], [])):
        with pytest.raises(
            ValueError, match=r"pair 1 has \d tokens of context and \d to be scored, but needs at least 1"
        ):
            plan([([1], [2]), pair], max_length=20, rows=4)


def test_batches_hold_every_pair_once_and_no_more_than_asked_for():
    batches = plan(some_pairs(), max_length=100, rows=4)
    assert sorted(place for batch in batches for one in batch for place in one.places) == list(range(12))
    assert all(sum(len(one.places) for one in batch) <= 4 for batch in batches)
    assert all(len({len(one.places) for one in batch}) == 1 for batch in batches)


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
    with pytest.raises(ValueError, match=r"not the same: \{'a': 1\} and \{'a': 2\}"):
        over_questions({"a": [0.0]}, {"a": [0.0, 1.0]})
