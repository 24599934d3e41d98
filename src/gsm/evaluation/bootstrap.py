"""Whether one model is better than another on the same questions, or only luckier with them: the paired bootstrap; and
how far a mean over windows of text is known.

Every task's questions are drawn anew, with replacement and for both models alike; the tasks stay. What the seeds of
training do is not in the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A difference between two models, second minus first.

    Attributes:
        difference: mean over the questions of each task, then over the tasks.
        low, high: where the difference lies in the middle 95 % (or another part) of the draws.
        samples: questions of all tasks.
    """

    difference: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{100 * self.difference:+.2f} [{100 * self.low:+.2f}, {100 * self.high:+.2f}]"


def paired(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    *,
    draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The difference between two models, with its bootstrap interval (Efron and Tibshirani 1993, percentiles).

    A mean depends only on how often each value was drawn, so the counts are drawn, not the questions.

    Args:
        first, second: the scores of each task's questions, in the same order.
        draws: how often the questions are drawn anew.
        confidence: part of the draws that lies between ``low`` and ``high``.
        seed: of the draws.

    Raises:
        ValueError: the two do not have the same tasks with as many questions each, or there are none.
    """
    counts = [{task: len(scores) for task, scores in one.items()} for one in (first, second)]
    if counts[0] != counts[1] or not all(counts[0].values()) or not counts[0]:
        raise ValueError(f"the models' questions are not the same: {counts[0]} and {counts[1]} by task")
    generator = np.random.default_rng(seed)
    mean, drawn = 0.0, np.zeros(draws)
    for task, scores in first.items():
        apart = np.asarray(second[task], dtype=np.float64) - np.asarray(scores, dtype=np.float64)
        values, times = np.unique(apart, return_counts=True)
        mean += apart.mean() / len(first)
        drawn += generator.multinomial(len(apart), times / len(apart), size=draws) @ values / len(apart) / len(first)
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(mean), float(low), float(high), sum(counts[0].values()))


def interval(
    sums: Sequence[float],
    weights: Sequence[float],
    *,
    draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Where sum(sums) / sum(weights) lies in the middle of the draws, if units with both are drawn anew.

    Args:
        sums, weights: of every unit: of a window of text, its loss and its number of targets.
        draws, confidence, seed: as in ``paired``.

    Raises:
        ValueError: there are no units, or not as many weights.
    """
    if not sums or len(sums) != len(weights):
        raise ValueError(f"there are {len(sums)} sums and {len(weights)} weights: give one of each for every unit")
    times = np.random.default_rng(seed).multinomial(len(sums), [1 / len(sums)] * len(sums), size=draws)
    drawn = (times @ np.asarray(sums, dtype=np.float64)) / (times @ np.asarray(weights, dtype=np.float64))
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
