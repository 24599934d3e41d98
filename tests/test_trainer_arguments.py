"""A run takes the arguments of Lightning's Trainer, but for those that would change what a step is."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import lightning
import pytest
from short_runs import arguments, folder_of, logged, typed

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.paths import ROOT
from gsm.training import trainer as trainers
from gsm.training.run import train

SIGNATURE = inspect.signature(lightning.Trainer).parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 2) for name in trainers.INSTEAD),
        *(("max_steps", 0), ("val_check_interval", 0), ("log_every_n_steps", 0), ("gradient_clip_val", -1.0)),
        *(("strategy", "deepspeed"), ("val_check_interval", 0.5), ("limit_train_batches", 0), ("accelerator", "mps")),
    ],
)
def test_what_would_change_a_step_or_train_nothing_is_refused(name: str, value: Any):
    """Clipping by value clipped by norm, and other loggers and folders were passed over."""
    assert name in SIGNATURE
    with pytest.raises(ConfigError) as error:
        trainers.refuse_arguments({"val_check_interval": 1, name: value})
    assert f"trainer.{name}" in str(error.value) and "\n" not in str(error.value)


def test_a_profiler_is_no_part_of_what_a_run_trains():
    plain, profiled = (compose(["size=pico", *words]) for words in ([], ["+trainer.profiler=simple"]))
    assert plain["folder"] == profiled["folder"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
def test_the_profilers_of_the_documentation_report_and_change_nothing(home: Path, tmp_path: Path, processes: Any):
    page = (ROOT / "docs/training.md").read_text()
    (profiled,) = re.findall(r"```yaml\n(defaults:\n  - default\nprofiler:\n.*?)```", page, re.DOTALL)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/profiled.yaml").write_text(profiled)
    shared = [word for word in arguments(home, "profilers", "trainer.max_steps=9") if word != "trainer=cpu"]
    folders = []
    for arm, word in {"plain": "trainer=default", "whole": "trainer=profiled"}.items():
        config = compose([*shared, f"name={arm}", word], [tmp_path])
        train(config)
        folders.append(Path(config["folder"]))
    (trace,) = (folders[1] / "profile").glob("*training_step*.pt.trace.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("[pl][profile]") and name.endswith(".training_step") for name in names) == 3
    assert "Self CPU" in (folders[1] / "profile/fit-operations.txt").read_text()
    printed = typed(processes, tmp_path, "train.py", *shared, "name=simple", "+trainer.profiler=simple").stderr
    assert "FIT Profiler Report" in printed and "optimizer_step" in printed
    assert logged(folders[0]) == logged(folders[1]) == logged(folder_of(folders[0].parents[1] / "simple"))
