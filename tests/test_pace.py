"""A run says how long it takes before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gsm.config.compose import compose
from gsm.experiments import pace
from gsm.experiments.experiment import _Work
from gsm.experiments.fit import train
from gsm.experiments.trials import Experiment

ANYWHERE = ["size=pico", "data=needle", "ngrams=false", "sample=false", "trainer.log_every_n_steps=30"]
GIVEN = [*ANYWHERE, "trainer=cpu"]


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


@pytest.mark.parametrize("word", ["trainer.max_steps=19", "compile=true", "trainer=fsdp trainer.devices=2"])
def test_nothing_is_timed_where_it_would_take_as_long_or_says_nothing(word: str):
    assert pace.seconds(compose([*ANYWHERE, "trainer.max_steps=500", *word.split()])) is None


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


def test_ranks_with_a_whole_model_each_are_timed_and_what_cannot_be_computed_is_not():
    given = [*ANYWHERE, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=20"]
    assert pace.seconds(compose(given), world=2) is not None
    assert pace.seconds(compose([*GIVEN, "trainer.max_steps=20", "model.stages=[9]"])) is None


def test_validations_count_as_many_batches_as_there_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pace, "_timed", lambda *_: (0.0, 1.0))
    given = [*GIVEN, "trainer.max_steps=100", "trainer.val_check_interval=50", "data.validation_sequences=64"]
    for words, batches in {"": 4, "trainer.limit_val_batches=0": 0, "trainer.limit_val_batches=3": 3}.items():
        assert pace.seconds(compose([*given, *words.split()])) == 2 * batches
    assert pace.seconds(compose([*given, "trainer.limit_val_batches=0.5"])) == 2 * 2


def test_a_run_and_an_experiment_say_how_long_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(pace, "seconds", lambda *_, **__: 600.0)
    given = [*GIVEN, f"logs={tmp_path}", "trainer.max_steps=1", "data.validation_sequences=2"]
    train(compose(given))
    assert "\ntime     about 10 minutes, by a batch that was timed just now\n" in capsys.readouterr().out
    words = [*given, "seeds=[1,2]"]
    experiment = Experiment(compose(words), words)
    said = _Work(experiment, experiment.trials()).takes()
    assert said == "training takes about 20 minutes here, by a batch of every arm timed just now"
    monkeypatch.setattr(pace, "seconds", lambda *_, **__: None)
    assert _Work(experiment, experiment.trials()).takes() == ""
