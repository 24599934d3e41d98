"""N-gram baselines: models of counts, on the very tokens that a model was trained on. N examples, V vocabulary.

A model that reads only the last few tokens can hardly beat a good n-gram model of its order, so these numbers show how
much of a model's gain is more than local statistics. Orders above 1 use interpolated modified Kneser-Ney
smoothing (Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1998, section 3), the
strongest of the classical ones:

    P_k(w | h) = (max(a(hw) - D(a(hw)), 0) + (D_1 N_1(h) + D_2 N_2(h) + D_3 N_3+(h)) P_{k-1}(w | h')) / sum_w a(hw)

h are the k - 1 tokens before w and h' those without the oldest; a counts occurrences at the highest order and distinct
older neighbours below it; N_i(h) is how many w have a(hw) = i; P_0 is uniform. An unseen h leaves P_{k-1}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

FALLBACK = (0.5, 1.0, 1.5)  # discounts where counts of counts are too few to estimate them; KenLM uses the same


def measure(
    train_sequences: Iterable[Mapping[str, Any]],
    validation_sequences: Iterable[Mapping[str, Any]],
    *,
    order: int,
    vocabulary: int,
    bytes_per_token: float,
) -> float:
    """Return the bits per byte of an n-gram model on exactly the targets that a model's validation loss averages.

    Order 1 is the unigram distribution with one added to every count; higher orders are `KneserNey`.

    Args:
        train_sequences: mappings with `tokens`, `targets` and `documents`, integers [T] each (`TextData.consumed`).
            A sequence that comes again, in another pass over the data, counts once: smoothing reads single counts as
            rare events, which a repetition would hide.
        validation_sequences: the same (`TextData.validation`).
        order: length of the n-grams, at least 1; 5 means four tokens of history.
        vocabulary: V of the tokenizer.
        bytes_per_token: bytes for each scored target (`TextData.bytes_per_token`).

    Raises:
        ValueError: `order` is below 1, a token lies outside the vocabulary, or there is nothing to count or score.
    """
    train = examples(train_sequences, order, vocabulary, once=True)
    validation = examples(validation_sequences, order, vocabulary)
    model = AddOne(train[0], vocabulary) if order == 1 else KneserNey(train, vocabulary)
    return float(-np.log2(model.probabilities(validation)).mean()) / bytes_per_token


def examples(
    sequences: Iterable[Mapping[str, Any]], order: int, vocabulary: int, *, once: bool = False
) -> list[np.ndarray]:
    """Return every scored target with the tokens before it, newest first: `order` arrays, int64 [N].

    The first array holds the targets, the next the token just before each, and so on. Where the history would reach
    over the beginning of a document or of a sequence it is filled with the id V.

    Args:
        once: drop sequences that came before.

    Raises:
        ValueError: as in `measure`.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1, got {order}")
    token_BT, target_BT, document_BT = _stack(sequences, once)
    scored_BT = target_BT >= 0
    history = []
    for lag in range(order - 1):
        older_BT = np.full_like(token_BT, vocabulary)
        same_BT = document_BT[:, lag:] == document_BT[:, : document_BT.shape[1] - lag]
        older_BT[:, lag:] = np.where(same_BT, token_BT[:, : token_BT.shape[1] - lag], vocabulary)
        history.append(older_BT[scored_BT])
    targets = target_BT[scored_BT]
    _require_examples(targets, token_BT, vocabulary)
    return [targets, *history]


class AddOne:
    """The unigram distribution with one added to every count."""

    def __init__(self, target_N: np.ndarray, vocabulary: int) -> None:
        counts = np.bincount(target_N, minlength=vocabulary) + 1.0
        self.probability_V = counts / counts.sum()

    def probabilities(self, newest_first: list[np.ndarray]) -> np.ndarray:
        """Return the probability of each target, float64 [N]."""
        return self.probability_V[newest_first[0]]


class KneserNey:
    """Interpolated modified Kneser-Ney, counted from `examples`; its order is the length of that list."""

    def __init__(self, newest_first: list[np.ndarray], vocabulary: int) -> None:
        self.vocabulary, base = vocabulary, vocabulary + 1
        self._grams, longest = _Trie.grow(newest_first, base)
        neighbours = [np.bincount(codes // base) for codes in self._grams.codes[1:]]
        history_codes: list[np.ndarray] = []
        history = np.zeros(len(self._grams.codes[0]), dtype=np.int64)  # of each gram; of a single token it is empty
        self._levels = []
        for order, counts in enumerate([*neighbours, longest]):
            if order:
                parent, oldest = np.divmod(self._grams.codes[order], base)
                codes, history = np.unique(history[parent] * base + oldest, return_inverse=True)
                history_codes.append(codes)
            self._levels.append(_Level.discounted(counts, history))
        self._histories = _Trie(history_codes, base)

    def probabilities(self, newest_first: list[np.ndarray]) -> np.ndarray:
        """Return the probability of each target after its history, float64 [N]; `newest_first` is from `examples`."""
        gram_ids = self._grams.find(newest_first)
        history_ids = [np.zeros_like(newest_first[0]), *self._histories.find(newest_first[1:])]
        probability = np.full(len(newest_first[0]), 1 / self.vocabulary)
        for level, gram, history in zip(self._levels, gram_ids, history_ids, strict=True):
            probability *= np.where(history >= 0, level.passed_on[history], 1.0)
            probability += np.where(gram >= 0, level.kept[gram], 0.0)
        return probability


@dataclass(frozen=True)
class _Level:
    """One order: `kept` is the first term of P_k for each gram, `passed_on` the factor of P_{k-1} for each history."""

    kept: np.ndarray
    passed_on: np.ndarray

    @staticmethod
    def discounted(counts: np.ndarray, history_of_gram: np.ndarray) -> _Level:
        discount = np.array([0.0, *_discounts(counts)])[np.minimum(counts, 3)]
        total = np.bincount(history_of_gram, weights=counts)
        passed_on = np.bincount(history_of_gram, weights=discount) / total
        return _Level((counts - discount) / total[history_of_gram], passed_on)


@dataclass(frozen=True)
class _Trie:
    """The rows of tokens that occur, at every depth.

    `codes[k]` holds, sorted, parent x (V + 1) + token for each distinct row of k + 1 tokens; a row's id is its place
    there, and its parent is the id of the row without its last (oldest) token.
    """

    codes: list[np.ndarray]
    base: int

    @staticmethod
    def grow(columns: list[np.ndarray], base: int) -> tuple[_Trie, np.ndarray]:
        """Return the trie of all rows, and the count of each complete row; `base` is V + 1."""
        codes, id_N, counts = [], np.zeros_like(columns[0]), np.zeros(0)
        for column in columns:
            distinct, id_N, counts = np.unique(id_N * base + column, return_inverse=True, return_counts=True)
            codes.append(distinct)
        return _Trie(codes, base), counts

    def find(self, columns: list[np.ndarray]) -> list[np.ndarray]:
        """Return the id of each row at every depth, -1 where it does not occur."""
        ids: list[np.ndarray] = []
        for column, codes in zip(columns, self.codes, strict=True):
            wanted = (ids[-1] if ids else 0) * self.base + column
            place = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
            missing = codes[place] != wanted  # below a missing parent every code is negative, so missing as well
            ids.append(np.where(missing, -1, place))
        return ids


def _discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """Return D_1, D_2 and D_3+ of modified Kneser-Ney, from the numbers of grams that occur once, twice, three and four
    times."""
    n1, n2, n3, n4 = (int((counts == times).sum()) for times in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return FALLBACK
    y = n1 / (n1 + 2 * n2)
    estimates = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return estimates if all(0 <= d <= times for times, d in enumerate(estimates, 1)) else FALLBACK


def _stack(sequences: Iterable[Mapping[str, Any]], once: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all sequences as int64 [B,T] arrays of tokens, targets and documents."""
    rows: dict[str, list[np.ndarray]] = {"tokens": [], "targets": [], "documents": []}
    seen = set()
    for sequence in sequences:
        values = {name: _whole(name, np.asarray(sequence[name])) for name in rows}
        if once:
            text = values["tokens"].tobytes() + values["targets"].tobytes()
            if text in seen:
                continue
            seen.add(text)
        for name, value in values.items():
            rows[name].append(value)
    if not rows["tokens"]:
        raise ValueError("sequences must have at least one, got none")
    token_BT, target_BT, document_BT = (np.stack(values) for values in rows.values())
    return token_BT, target_BT, document_BT


def _whole(name: str, values: np.ndarray) -> np.ndarray:
    """Return values as int64. Raise ValueError for fractions: cut off, two documents would become one."""
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got {values.dtype}")
    return values.astype(np.int64)


def _require_examples(targets: np.ndarray, tokens: np.ndarray, vocabulary: int) -> None:
    if not len(targets):
        raise ValueError("targets must have at least one that counts, got only ignored ones; use longer documents")
    largest = int(max(targets.max(), tokens.max()))
    if largest >= vocabulary or tokens.min() < 0:
        worst = largest if largest >= vocabulary else int(tokens.min())
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, below the vocabulary, got {worst}")
