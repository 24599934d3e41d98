"""A wrong command ends at once with its key, on the command line as its user sees it, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from short_runs import typed

OURS = {  # commands, and the key in the one line that each prints
    "train.py model.indexer_weight=-1": "model.indexer_weight",
    "train.py trainer.devices=0": "devices",
    "train.py name=../../x": "name",
    "train.py logs=''": "logs",
    "train.py data=folder data.path=nowhere": "nowhere",
    "train.py start_from=nowhere": "nowhere",
    "train.py seeds=2 seed=x": "seed",
    "train.py arms={a:['model.state_size=x']} seeds=1": "model.state_size",
    "benchmark.py +benchmark.modls=1": "modls",
    "evaluate.py chekpoint=nano": "checkpoint",
    "evaluate.py checkpoint=nowhere": "nowhere",
    "evaluate.py checkpoint=nano lengths=256,many": "lengths",
    "generate.py prompt=a": "checkpoint",
    "generate.py checkpoint=nano top_p=2": "top_p",
    "compare.py nowhere colums=a": "columns",
    "export.py checkpoint=nano": "to=",
}
HYDRAS = {  # in its own words
    "train.py sed=1": "sed",
    "train.py model=gms": "baseline",
    "train.py seed": "seed",
    "train.py --resume": "--resume",
    "train.py --config-dir nowhere": "nowhere",
    "benchmark.py benchmark=kernel": "kernels",
}


@pytest.mark.parametrize("command", [*OURS, *HYDRAS])
def test_a_wrong_command_names_its_key_and_leaves_nothing(command: str, tmp_path: Path, processes: Any):
    script, *words = command.split()
    if script == "export.py":
        pytest.importorskip("transformers")
    given = ["size=pico", "data=needle", "trainer=cpu", f"logs={tmp_path / 'logs'}"] if script == "train.py" else []
    done = typed(processes, tmp_path, script, *given, *words)
    assert done.returncode in (1, 2) and not done.stdout, done.stdout
    assert {**OURS, **HYDRAS}[command] in done.stderr and "Traceback" not in done.stderr, done.stderr
    if command in OURS:
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_of_yamls_is_named(tmp_path: Path, processes: Any):
    for script in ("train.py", "evaluate.py"):
        done = typed(processes, tmp_path, script, "checkpoint=nano", GSM_CONFIGS=str(tmp_path / "gone"))
        assert done.returncode == 1 and done.stderr.startswith("error: ") and "gone" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_jobs_of_a_sweep_after_one_that_fails_are_started(tmp_path: Path, processes: Any):
    done = typed(processes, tmp_path, "train.py", "-m", "seed=-1,-2", f"logs={tmp_path / 'logs'}")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    said = done.stderr.splitlines()[:2]
    assert all(line.startswith("error: seed ") and line.endswith(f"got {-n}") for n, line in enumerate(said, 1)), said
