"""The runs of a configuration as a list."""

from __future__ import annotations

from pathlib import Path

from short_runs import TINY

from gsm.config.compose import compose
from gsm.experiments.execute import expand

RUNS = "runs={train: null, extend: {after: train, trainer.max_steps: 1}, loss: {after: extend, evaluate: {}}}"
ARMS = "arms={one: [], two: ['++runs.extend.optimizer.weight_decay=0.2']}"


def given(place: Path, *words: str) -> list[str]:
    return [*TINY, "data.path=.", f"logs={place}", "name=toy", *words]


def test_each_run_stands_once_with_its_arm_seed_and_folder_and_nothing_is_written(tmp_path: Path):
    words = given(tmp_path, RUNS, ARMS, "seeds=2")
    runs = expand(compose(words), words)
    names = ["one-seed0-train", "one-seed0-extend", "one-seed0-loss", "two-seed0-extend", "two-seed0-loss"]
    assert [run.label for run in runs[:5]] == names and len(runs) == 10
    assert f"start_from={runs[0].find_folder()}" in runs[3].arguments
    assert not list(tmp_path.iterdir())


def test_a_single_run_is_a_list_of_one(tmp_path: Path):
    words = given(tmp_path)
    (run,) = expand(compose(words), words)
    assert run.find_folder() == Path(compose(words)["folder"])
