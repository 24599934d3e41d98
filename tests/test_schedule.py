"""Learning rates by step: what each schedule does, how WSD runs branch, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from small import SHALLOW, build

from gsm.training.optimizer import SCHEDULES, AdamW, Muon

SETTINGS: dict[str, Any] = {"learning_rate": 3e-3, "warmup_steps": 10, "final_fraction": 0.1, "weight_decay": 0.1}


def rates(steps: int, **more: Any) -> list[float]:
    made = AdamW(**{**SETTINGS, **more})
    return [made.factor(step, steps) for step in range(steps)]


def test_the_default_is_the_cosine_it_was_bit_for_bit():
    def before(step: int, steps: int) -> float:
        warmup = min(10, steps // 4)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return 0.1 + (1 - 0.1) * (1 + math.cos(math.pi * progress)) / 2

    for steps in (1, 2, 3, 7, 100, 481):
        made = AdamW(**SETTINGS)
        assert [made.factor(i, steps) for i in range(steps + 2)] == [before(i, steps) for i in range(steps + 2)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 5, 100])
def test_every_schedule_warms_up_reaches_its_peak_and_ends_at_its_fraction(schedule: str, steps: int):
    found, warmup = rates(steps, schedule=schedule), min(10, steps // 4)
    assert found[:warmup] == [(i + 1) / warmup for i in range(warmup)]
    assert all(a >= b for a, b in itertools.pairwise(found[max(0, warmup - 1) :])), "from the peak it only falls"
    if steps > 2:
        assert max(found) == pytest.approx(1.0) and found[-1] == pytest.approx(0.1)


def test_linear_falls_by_the_same_amount_in_every_step():
    falls = [a - b for a, b in itertools.pairwise(rates(100, schedule="linear")[10:])]
    assert falls == pytest.approx([0.9 / 89] * 89)


def test_wsd_stays_at_its_peak_and_falls_in_a_line_over_the_last_part():
    found = rates(100, schedule="wsd", decay_fraction=0.25, final_fraction=0.0)
    assert found[10:75] == [1.0] * 65
    assert found[75:] == pytest.approx([(24 - i) / 25 for i in range(25)])


def test_wsd_without_decay_is_stable_to_the_end_and_with_nothing_else_begins_after_the_warm_up():
    assert rates(100, schedule="wsd", decay_fraction=0.0)[9:] == [1.0] * 91
    found = rates(100, schedule="wsd", decay_fraction=1.0)
    assert found[9] == 1.0 > found[10]


def test_runs_of_different_length_are_one_run_until_the_shorter_one_decays():
    """So that one long run has a result at every budget, each a branch of a few steps."""
    short, long = rates(100, schedule="wsd"), rates(400, schedule="wsd")
    assert short[:80] == long[:80] and short[80] < long[80]


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_what_muon_leaves_to_adamw_can_have_a_rate_of_its_own_in_the_same_schedule(factor: float):
    settings = Muon(**SETTINGS, schedule="wsd", adamw_factor=factor)
    optimizer = settings.build(build("gsm", geometry=SHALLOW).parameter_groups())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: settings.factor(step, 100))
    peaks = {group["name"]: group["initial_lr"] for group in optimizer.param_groups}
    assert peaks.pop("matrices") == 3e-3, "which is the first group, whose rate is logged"
    assert set(peaks.values()) == {factor * 3e-3} and len(peaks) > 2
    assert schedule.get_last_lr()[0] == 3e-3 / 10
    assert schedule.get_last_lr()[1:] == [peak / 10 for peak in peaks.values()]
