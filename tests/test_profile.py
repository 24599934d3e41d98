"""profile=true: files that others can read, of the steps that were asked for, and the same training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from short_runs import arguments, lines

from gsm.config.compose import compose
from gsm.training.callbacks.profile import Profile
from gsm.training.run import train


def run(home: Path, name: str, *more: str) -> Path:
    config = compose(arguments(home, name, "trainer.max_steps=9", *more))
    train(config)
    return Path(config["folder"])


@pytest.mark.slow
def test_a_profile_is_of_the_steps_that_were_asked_for_and_changes_nothing(home: Path):
    watched = run(home, "watched", "profile=true", "callbacks.profile.after=2", "callbacks.profile.steps=3")
    trace = json.loads((watched / "profile/trace.json").read_text())
    steps = [event for event in trace["traceEvents"] if "AdamW" in str(event.get("name")) and ".step" in event["name"]]
    assert len(steps) == 3
    assert "Self CPU" in (watched / "profile/operations.txt").read_text()
    plain = run(home, "plain")
    assert not (plain / "profile").exists()
    assert lines(watched) == lines(plain)


def test_training_that_ends_too_early_says_so(home: Path, capsys: pytest.CaptureFixture[str]):
    folder = run(home, "early", "profile=true", "callbacks.profile.after=50")
    assert not (folder / "profile").exists()
    assert "nothing to see, as training ended before step 50" in capsys.readouterr().out


def test_numbers_out_of_range_are_named():
    with pytest.raises(ValueError, match="steps=0 is not allowed because it is below 1"):
        Profile(True, "anywhere", steps=0)
