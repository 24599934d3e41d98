"""The n-gram baselines: true distributions, equal to slow counting, over the targets that a model is scored on."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from gsm.evaluation.ngrams import FALLBACK, AddOne, KneserNey, examples, measure

V = 7
END = V - 1
Sequence = dict[str, np.ndarray]


def sequence(tokens: list[int], following: int) -> Sequence:
    """Return a packed sequence of the data: the target is the next token, but after an end of text there is none."""
    token_T = np.array(tokens)
    target_T = np.where(token_T == END, -100, np.array([*tokens[1:], following]))
    document_T = np.cumsum(token_T == END) - (token_T == END)
    return {"tokens": token_T, "targets": target_T, "documents": document_T}


def sample(count: int, seed: int, length: int = 12) -> list[Sequence]:
    """Return sequences whose next token depends on the last two."""
    random = np.random.default_rng(seed)
    stream = [0, 1]
    while len(stream) < count * length + 1:
        likely = (stream[-1] * 3 + stream[-2]) % V
        stream.append(likely if random.random() < 0.6 else int(random.integers(V)))
    return [sequence(stream[i * length : (i + 1) * length], stream[(i + 1) * length]) for i in range(count)]


def grams_of(sequences: list[Sequence], order: int) -> list[tuple[int, ...]]:
    """Return every scored target after its history, oldest token first. V stands for a missing token."""
    grams = []
    for line in sequences:
        for place, target in enumerate(line["targets"]):
            if target != -100:
                places = range(place - order + 2, place + 1)
                in_document = [p >= 0 and line["documents"][p] == line["documents"][place] for p in places]
                history = [
                    int(line["tokens"][p]) if inside else V for p, inside in zip(places, in_document, strict=True)
                ]
                grams.append((*history, int(target)))
    return grams


class SlowKneserNey:
    """The same model with dictionaries and recursion, from the formula."""

    def __init__(self, grams: list[tuple[int, ...]]) -> None:
        self.order = len(grams[0])
        self.counts: dict[int, Counter[tuple[int, ...]]] = {self.order: Counter(grams)}
        for order in range(self.order - 1, 0, -1):
            self.counts[order] = Counter(gram[1:] for gram in self.counts[order + 1])
        self.after: dict[int, dict[tuple[int, ...], dict[int, int]]] = {}
        for order, counts in self.counts.items():
            table: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
            for gram, count in counts.items():
                table[gram[:-1]][gram[-1]] = count
            self.after[order] = table
        self.discount = {order: self.estimate(counts) for order, counts in self.counts.items()}

    @staticmethod
    def estimate(counts: Counter[tuple[int, ...]]) -> tuple[float, ...]:
        n = Counter(counts.values())
        if not (n[1] and n[2] and n[3]):
            return FALLBACK
        y = n[1] / (n[1] + 2 * n[2])
        discounts = tuple(i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3))
        return discounts if all(0 <= d <= i for i, d in enumerate(discounts, 1)) else FALLBACK

    def probability(self, gram: tuple[int, ...]) -> float:
        if not gram:
            return 1 / V
        lower = self.probability(gram[1:] if len(gram) > 1 else ())
        followers = self.after[len(gram)].get(gram[:-1])
        if not followers:
            return lower
        discounts = self.discount[len(gram)]
        total = sum(followers.values())
        freed = sum(discounts[min(count, 3) - 1] for count in followers.values())
        count = followers.get(gram[-1], 0)
        discounted = count - discounts[min(count, 3) - 1] if count else 0.0
        return (discounted + freed * lower) / total


@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("count", [3, 60])
def test_it_agrees_with_slow_counting(order: int, count: int) -> None:
    train, validation = sample(count, seed=1), sample(20, seed=2)
    slow = SlowKneserNey(grams_of(train, order))
    expected = [slow.probability(gram) for gram in grams_of(validation, order)]
    fast = KneserNey(examples(train, order, V), V).probabilities(examples(validation, order, V))
    np.testing.assert_allclose(fast, expected, rtol=1e-12)


def test_the_slow_comparison_reaches_the_estimated_discounts() -> None:
    estimated = SlowKneserNey(grams_of(sample(60, seed=1), 3)).discount
    assert any(discount != FALLBACK for discount in estimated.values())


@pytest.mark.parametrize("order", [2, 3, 5])
def test_probabilities_sum_to_one_after_any_history(order: int) -> None:
    model = KneserNey(examples(sample(20, seed=3), order, V), V)
    histories = list(itertools.product(range(V + 1), repeat=order - 1))
    oldest_first = np.array([(*history, token) for history in histories for token in range(V)])
    newest_first = [oldest_first[:, order - 1 - lag] for lag in range(order)]
    sums = model.probabilities(newest_first).reshape(len(histories), V).sum(1)
    np.testing.assert_allclose(sums, 1, rtol=1e-12)


def test_the_unigram_adds_one_to_every_count() -> None:
    model = AddOne(np.array([0, 0, 3]), V)
    assert model.probability_V.sum() == pytest.approx(1)
    assert model.probabilities([np.array([0, 3, 6])]).tolist() == pytest.approx([3 / 10, 2 / 10, 1 / 10])


def test_only_targets_that_a_model_is_scored_on_count() -> None:
    line = sequence([0, 1, END, 2, 3], following=4)
    targets, last, older = examples([line], 3, V)
    assert targets.tolist() == [1, END, 3, 4]
    assert last.tolist() == [0, 1, 2, 3]
    assert older.tolist() == [V, 0, V, 2], "history ends where the document or the sequence begins"


def test_bits_per_byte_is_the_mean_over_targets() -> None:
    train, validation = sample(30, seed=4), sample(10, seed=5)
    slow = SlowKneserNey(grams_of(train, 3))
    bits = [-math.log2(slow.probability(gram)) for gram in grams_of(validation, 3)]
    bits_per_byte = measure(train, validation, order=3, vocabulary=V, bytes_per_token=2.5)
    assert bits_per_byte == pytest.approx(sum(bits) / len(bits) / 2.5, rel=1e-12)


@pytest.mark.parametrize("order", [1, 5])
def test_text_seen_twice_counts_once(order: int) -> None:
    train, validation = sample(20, seed=8), sample(5, seed=9)
    settings = {"order": order, "vocabulary": V, "bytes_per_token": 1.0}
    assert measure(train * 3, validation, **settings) == measure(train, validation, **settings)


def test_a_sequence_of_nothing_but_ignored_targets_is_skipped_or_named() -> None:
    empty = sequence([END, END, END], following=0)
    assert len(examples([empty, sequence([0, 1, 2], following=3)], 2, V)[0]) == 3
    with pytest.raises(ValueError, match="target"):
        examples([empty], 2, V)
