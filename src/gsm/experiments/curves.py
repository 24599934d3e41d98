"""Learning curves of finished runs, by arm: of every seed, and as paired differences from the first arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gsm.experiments.table import RunSummary
from gsm.training.callbacks.metrics_file import read_metrics

Curve = dict[float, float]  # values by step, or by the tokens until then
Curves = dict[str, dict[tuple[int, str], Curve]]  # arm -> seed and task of each of its runs that have the metric
ByArm = Mapping[str, Sequence[RunSummary]]


def read_curves(by_arm: ByArm, axis: str = "step") -> dict[str, Curves]:
    """Return every metric of the runs, by name; of runs after one another, those of the first.

    Args:
        by_arm: runs by arm.
        axis: ``step``, or ``tokens``: the number trained on up to a step, known for the steps that the run has logged.

    Raises OSError where a metrics.jsonl cannot be read.
    """
    found: dict[str, Curves] = {}
    for arm, runs in by_arm.items():
        for run in runs:
            metrics = read_metrics(run.curves)
            for name, values in metrics.items():
                across = metrics.get("train/tokens", {}) if axis == "tokens" else {step: step for step in values}
                if curve := {across[step]: value for step, value in values.items() if step in across}:
                    found.setdefault(name, {arm: {} for arm in by_arm})[arm][run.seed, run.task] = curve
    return found


def minus_first(curves: Curves) -> Curves:
    """Return every arm minus the first, seed by seed on the same task, at the steps that both have; the first arm is
    empty."""
    first = next(iter(curves), "")
    return {
        arm: {
            run: {step: value - base[step] for step, value in curve.items() if step in base}
            for run, curve in runs.items()
            if arm != first and (base := curves[first].get(run))
        }
        for arm, runs in curves.items()
    }
