"""The time that the runs of an experiment still take, from the steps that some of them have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gsm.experiments.runs import Run
from gsm.training import weights
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.callbacks.progress import TIMED, clock

METRICS = "metrics.csv"


@dataclass
class Remaining:
    """Seconds per step of the runs that were watched.

    Attributes:
        at_once: runs at a time.
        rates: seconds per step, by arm.
    """

    at_once: int
    rates: dict[str, float] = field(default_factory=dict)
    _begins: dict[Run, tuple[int, float]] = field(default_factory=dict)  # first logged step, and its time
    _sizes: dict[Run, int] = field(default_factory=dict)

    def watch(self, run: Run, now: float) -> bool:
        """Read the step that a run has logged at the time ``now``, in seconds; True if this gives the first rate."""
        if run.config is None:
            return False
        path = run.folder / METRICS
        size = path.stat().st_size if path.is_file() else 0
        before = self._sizes.setdefault(run, size)  # the first look may find the file of an earlier run
        self._sizes[run] = size
        if size in (0, before):
            return False
        step, first = _logged(run), not self.rates
        begin, since = self._begins.setdefault(run, (step, now))
        if step - begin >= TIMED:
            self.rates[run.config["arm"]] = (now - since) / (step - begin)
        return first and bool(self.rates)

    def sentence(self, runs: Sequence[Run]) -> str:
        """Return the time that these unfinished jobs take; empty before a run has done twenty steps."""
        trained = [run for run in runs if run.config]
        if not self.rates or not trained:
            return ""
        mean = sum(self.rates.values()) / len(self.rates)  # for arms that have not begun
        seconds = sum(
            self.rates.get(run.config["arm"], mean) * self._steps(run, run.config) for run in trained if run.config
        )
        then = f", then {_count(len(runs) - len(trained), 'evaluation')}" if len(runs) > len(trained) else ""
        return f"{clock(seconds / min(self.at_once, len(trained)))} left for {_count(len(trained), 'run')}{then}"

    def _steps(self, run: Run, config: Mapping[str, Any]) -> int:
        """Return the steps that a run has not done; a branch begins where the run before it ends."""
        before = run.after.config if run.after and weights.is_branch(config) else None
        done = _logged(run) if run in self._begins else before["trainer"]["max_steps"] if before else 0
        return max(0, config["trainer"]["max_steps"] - done)


def _logged(run: Run) -> int:
    """Return the last step in a run's metrics."""
    return max((step for values in read_metrics(run.folder / METRICS).values() for step in values), default=0)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"
