"""Ranges of values that arms are tuned over by Optuna: what is to be tried next, when to end it, and what has won.

A study is not stored. It is asked anew each time, from its first attempt on, and told what lies in the experiment's
folder; each round of questions has random numbers of its own, which follow from the seed and from how many attempts
there were before. So what it asks for follows from the results alone, and is the same after any interruption.

Needs the extra ``tune``: import this module only where Optuna was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from gsm.experiments.asked import Range, quoted
from gsm.experiments.tune import Choice, Values

STARTUP = 4  # attempts that are drawn at random; and as many have to come to their end before one is ended early
DIGITS = 3  # of a value that is tried: it is typed again, and names a folder


@dataclass(frozen=True)
class Outcome:
    """What is known of an attempt that has ended.

    Attributes:
        cost: lower is better; infinite for one that has not come to its end.
        curve: what validations found before the last step, by step, lower is better, up to where it was ended.
    """

    cost: float
    curve: Mapping[int, float] = field(default_factory=dict)


class Study:
    """The attempts of an arm, and what follows from them.

    Args:
        space: by key, values of which one is taken, or a range.
        seed: of what is drawn at random.
    """

    def __init__(self, space: Mapping[str, Sequence[Any] | Range], seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.seed = dict(space), seed
        self.told: list[FrozenTrial] = []
        self._pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP)

    def ask(self, count: int) -> list[Values]:
        """What to try next, all of it before anything is heard of the first. May come to what was tried already."""
        number = int(np.random.SeedSequence([self.seed, len(self.told)]).generate_state(1)[0])
        study = self._study(optuna.samplers.TPESampler(seed=number, n_startup_trials=STARTUP))
        distributions = {key: _distribution(values) for key, values in self.space.items()}
        return [
            {key: _value(values, trial.params[key]) for key, values in self.space.items()}
            for trial in [study.ask(distributions) for _ in range(count)]
        ]

    def ends(self, curve: Mapping[int, float]) -> int | None:
        """The first step at which an attempt with this curve is to be ended: the best that it has found is worse than
        the median, at this step, of those that came to their end. None: it may go on."""
        study, known = self._study(), dict[int, float]()
        for step in sorted(curve):
            known[step] = curve[step]
            if self._pruner.prune(study, create_trial(state=TrialState.RUNNING, intermediate_values=known)):
                return step
        return None

    def tell(self, values: Values, outcome: Outcome) -> None:
        """Takes the next attempt. One that was ended early, or has diverged, counts as worse than those that were not,
        and the earlier the worse."""
        params = {key: _param(self.space[key], value) for key, value in values.items()}
        distributions = {key: _distribution(space) for key, space in self.space.items()}
        ended = math.isfinite(outcome.cost)
        self.told.append(
            create_trial(
                state=TrialState.COMPLETE if ended else TrialState.PRUNED,
                value=outcome.cost if ended else None,
                params=params,
                distributions=distributions,
                intermediate_values=dict(outcome.curve),
            )
        )

    def _study(self, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
        study = optuna.create_study(sampler=sampler, pruner=self._pruner)
        study.add_trials(self.told)
        return study


def search(
    study: Study, outcome: Callable[[Values], Outcome | None], attempts: int, at_once: int
) -> tuple[list[Values], Choice | None]:
    """What has to be tried next, or if nothing has, what has won.

    Args:
        study: not told anything yet; has been told of all earlier rounds when this returns.
        outcome: of values, asked for one after the other; None: they were not tried yet.
        attempts: how many there are to be.
        at_once: how many are asked for in one round.
    """
    tried: list[tuple[float, Values]] = []
    while len(tried) < attempts:
        asked = study.ask(min(at_once, attempts - len(tried)))
        found = [(values, outcome(values)) for values in asked]
        missing = [values for values, known in found if known is None]
        if missing:
            return _different(missing), None
        for values, known in found:  # after all of the round: what runs at once does not hear of one another
            if known is not None:
                study.tell(values, known)
                tried.append((known.cost, values))
    least, best = min(tried, key=lambda one: one[0])
    return [], Choice(best, {key: _different([values[key] for _, values in tried]) for key in best}, least)


def _different(found: Sequence[Any]) -> list[Any]:
    return [one for number, one in enumerate(found) if one not in found[:number]]


def _distribution(values: Sequence[Any] | Range) -> BaseDistribution:
    if not isinstance(values, Range):
        return CategoricalDistribution([quoted(one) for one in values])
    kind = IntDistribution if isinstance(values.low, int) and isinstance(values.high, int) else FloatDistribution
    return kind(values.low, values.high, log=values.log)  # pyright: ignore[reportArgumentType]


def _value(values: Sequence[Any] | Range, param: Any) -> Any:
    """What stands for Optuna's value in a configuration."""
    if not isinstance(values, Range):
        return next(one for one in values if quoted(one) == param)
    return param if isinstance(param, int) else min(max(float(f"{param:.{DIGITS}g}"), values.low), values.high)


def _param(values: Sequence[Any] | Range, value: Any) -> Any:
    return value if isinstance(values, Range) else quoted(value)
