"""Means and 95 % intervals over the seeds of an arm, the questions of a task, and windows of text.

Over seeds, which are few, a difference between two arms has a paired Student's t interval, from the seeds that both
arms have. Over questions and windows, which are many, the interval is a percentile bootstrap (Efron and Tibshirani
1993). A difference between two models on the same questions uses the same draws for both, so it is paired. A bootstrap
interval does not include the variance between training seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gsm.tables import number_text

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; the last one is used for more.
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
MIDDLE = (0.025, 0.975)  # quantiles of the draws at the ends of an interval
DRAWS = 10_000  # bootstrap samples
SEED = 0  # seed of the draws
ROUNDING = 1e-12  # relative rounding error, below which a difference is the same with every seed


@dataclass(frozen=True)
class Cell:
    """The mean of a quantity over seeds, with its spread: a cell of a table.

    Attributes:
        count: number of seeds that have the quantity.
        mean: None without seeds.
        spread: the sample standard deviation; of a difference, half the width of its 95 % interval. None if unknown.
        scale: of a difference, the size of the compared values, which sets the number of digits; otherwise None.
        differs: of a difference, whether 0 is outside of the 95 % interval.
    """

    count: int = 0
    mean: float | None = None
    spread: float | None = None
    scale: float | None = field(default=None, repr=False)
    differs: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        return self.text()

    def text(self, digits: int | None = None) -> str:
        """Return ``98.33``, with a spread ``98.33 +- 1.67``, for a difference ``+1.20 [-0.40, +2.80]``; ``-`` for none.

        Args:
            digits: decimal places; None: as in ``tables.number_text``.
        """
        if self.mean is None:
            return "-"
        like = self.mean if self.scale is None else self.scale

        def number(value: float) -> str:
            return number_text(value, like) if digits is None else f"{value:.{digits}f}"

        if self.scale is None:
            return number(self.mean) + (f" +- {number(self.spread)}" if self.spread is not None else "")
        middle = f"{'-' if self.mean < 0 else '+'}{number(abs(self.mean))}"
        if self.spread is None or self.spread <= ROUNDING * self.scale:  # two seeds, or the same difference with each
            return middle
        return f"{middle} [{number(self.mean - self.spread)}, {number(self.mean + self.spread)}]"


def over_seeds(values: Iterable[float | None]) -> Cell:
    """Return the mean and the sample standard deviation of the values, without those that are None."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return Cell()
    return Cell(len(numbers), statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


def over_pairs(pairs: Iterable[tuple[float | None, float | None]]) -> Cell:
    """Return the mean difference (first minus second) of pairs with the same seed, with its Student's t interval.

    Pairs with None are left out. With two pairs or fewer, there is no interval.
    """
    both = [(value, base) for value, base in pairs if value is not None and base is not None]
    difference = over_seeds(value - base for value, base in both)
    scale = max((abs(base) for _, base in both), default=None)
    if difference.spread is None or difference.mean is None:
        return replace(difference, scale=scale)
    quantile = QUANTILES[min(difference.count - 1, len(QUANTILES)) - 1]
    half = quantile * difference.spread / math.sqrt(difference.count)
    if difference.count < 3:  # for two seeds, half the interval would be thirteen standard errors
        return Cell(difference.count, difference.mean, None, scale)
    return Cell(difference.count, difference.mean, half, scale, abs(difference.mean) > half)


@dataclass(frozen=True)
class Interval:
    """A difference between two models, second minus first, with its 95 % bootstrap interval.

    Attributes:
        difference: mean over the questions of each task, then over the tasks.
        low, high: ends of the interval.
    """

    difference: float
    low: float
    high: float

    def text(self, digits: int = 2, scale: float = 100.0) -> str:
        """Return ``+1.20 [-0.40, +2.80]``, multiplied by ``scale``: by default in percent."""
        middle, low, high = (f"{scale * value:+.{digits}f}" for value in (self.difference, self.low, self.high))
        return f"{middle} [{low}, {high}]"


def over_questions(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Interval:
    """Return the difference between two models on the same questions, with its bootstrap interval.

    The questions of each task are resampled with replacement; the tasks are fixed.

    Args:
        first, second: by task, the scores of its questions, in the same order for both models.

    Raises:
        ValueError: the models differ in tasks or numbers of questions, or a task has no questions.
    """
    counts = [{task: len(scores) for task, scores in model.items()} for model in (first, second)]
    if counts[0] != counts[1] or not all(counts[0].values()) or not counts[0]:
        raise ValueError(f"both models must have the same questions by task, got {counts[0]} and {counts[1]}")
    generator = np.random.default_rng(SEED)
    mean, drawn = 0.0, np.zeros(DRAWS)
    for task, scores in first.items():
        apart = np.asarray(second[task], dtype=np.float64) - np.asarray(scores, dtype=np.float64)
        values, times = np.unique(apart, return_counts=True)  # draw how often each value occurs, not the questions
        mean += apart.mean() / len(first)
        drawn += generator.multinomial(len(apart), times / len(apart), size=DRAWS) @ values / len(apart) / len(first)
    low, high = np.quantile(drawn, MIDDLE)
    return Interval(float(mean), float(low), float(high))


def over_windows(sums: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % bootstrap interval of sum(sums) / sum(weights), with windows resampled.

    Args:
        sums: by window, the sum of its losses.
        weights: by window, its number of targets.

    Raises:
        ValueError: there are no windows, or the two differ in length.
    """
    if not sums or len(sums) != len(weights):
        raise ValueError(
            f"sums and weights must have one number for each window, got {len(sums)} sums and {len(weights)} weights"
        )
    times = np.random.default_rng(SEED).multinomial(len(sums), [1 / len(sums)] * len(sums), size=DRAWS)
    drawn = (times @ np.asarray(sums, dtype=np.float64)) / (times @ np.asarray(weights, dtype=np.float64))
    low, high = np.quantile(drawn, MIDDLE)
    return float(low), float(high)
