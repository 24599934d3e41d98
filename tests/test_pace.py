"""A run says how long it takes before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from gsm.config.compose import compose
from gsm.experiments import pace

GIVEN = ["size=pico", "data=needle", "trainer=cpu", "ngrams=false", "sample=false", "trainer.log_every_n_steps=30"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, ""),
        (59.0, ""),
        (61.0, "about a minute"),
        (150.0, "about 2 minutes"),
        (1000.0, "about 15 minutes"),
        (2400.0, "about 40 minutes"),
        (9000.0, "about 2.5 hours"),
        (400_000.0, "about 5 days"),
    ],
)
def test_a_time_is_told_as_roughly_as_it_is_known(found: float | None, said: str):
    assert pace.told(found) == said


@pytest.mark.parametrize("word", ["trainer.max_steps=19", "compile=true", "trainer=fsdp"])
def test_nothing_is_timed_where_it_would_take_as_long_or_says_nothing(word: str):
    assert pace.seconds(compose([*GIVEN, "trainer.max_steps=500", word])) is None


def test_a_longer_run_takes_longer_and_a_run_gone_on_with_less(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(pace._Step, "_now", lambda self: float(next(clock)))  # every batch takes a second
    config: dict[str, Any] = compose([*GIVEN, "trainer.max_steps=100", "data.validation_sequences=16"])
    whole = pace.seconds(config)
    assert whole == pytest.approx(100 * (1 + 1) + 1 * 1 * pace.FORWARD)  # a step: a batch, the optimiser
    assert pace.seconds(config, begin=40) == pytest.approx(60 * 2 + pace.FORWARD)
    twice = compose([*GIVEN, "trainer.max_steps=100", "data.validation_sequences=16", "global_batch=32"])
    assert pace.seconds(twice) == pytest.approx(100 * (2 + 1) + pace.FORWARD)


def test_of_sequences_that_grow_the_mean_counts():
    data = compose([*GIVEN, "data.shortest=32", "data.grow_from=0.5", "data.grow_until=0.5"])["data"]
    lengths = pace._lengths(data)
    assert lengths[:4] == [32] * 4 and lengths[4:] == [data["context"]] * 4
