"""The runs of a configuration as a list."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from short_runs import TINY

from gsm.config import command_line
from gsm.config.compose import compose
from gsm.experiments.execute import expand

RUNS = "runs={train: null, extend: {after: train, trainer.max_steps: 1}, loss: {after: extend, evaluate: {}}}"
ARMS = "arms={one: [], two: ['++runs.extend.data.batch_size=2']}"


def given(place: Path, *words: str) -> list[str]:
    return [*TINY, "data.path=.", f"logs={place}", "name=toy", *words]


def test_each_run_stands_once_with_its_arm_seed_and_folder_and_nothing_is_written(tmp_path: Path):
    words = given(tmp_path, RUNS, ARMS, "seeds=2")
    runs = expand(compose(words), words)
    places = [str(run.folder.relative_to(tmp_path / "toy")) for run in runs]
    assert places[:5] == ["one/seed0/train", "one/seed0/extend", "one/seed0/loss", "two/seed0/extend", "two/seed0/loss"]
    assert [run.name for run in runs] == places and len(places) == 10
    assert f"start_from={tmp_path}/toy/one/seed0/train" in runs[3].command
    assert not list(tmp_path.iterdir())


def test_a_single_run_is_a_list_of_one(tmp_path: Path):
    words = given(tmp_path)
    (run,) = expand(compose(words), words)
    assert run.folder == Path(compose(words)["folder"])


@pytest.mark.parametrize(
    ("words", "rest", "there"),
    [
        (["seed=1", "--cfg", "runs"], ["seed=1"], True),
        (["-c", "runs", "seed=1"], ["seed=1"], True),
        (["--cfg", "job"], ["--cfg", "job"], False),
    ],
)
def test_the_flag_is_taken_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, words: list[str], rest: list[str], there: bool
):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    assert command_line.take_cfg_runs() is there and sys.argv[1:] == rest
