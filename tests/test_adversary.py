"""The attack of tests/adversary, in samples; and some of its cases by name.

``make adversary ARGS="cases=2000"`` is the whole of it; ``ARGS="class=damage seed=123"`` tries one case again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_text
from adversary.kills import difference
from short_runs import arguments, typed

from gsm.config.compose import compose
from gsm.paths import ROOT
from gsm.training.run import train


def in_its_own_process(*words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a module of the attack as a command: it forks, which a process with threads must not.

    Args:
        root: the clone whose module it is.
    """
    paths = os.pathsep.join(str(root / name) for name in ("tests", "src", "kernels"))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, "-m", *words], cwd=root, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_judge_sees_its_canaries_in_a_clone_of_any_name(tmp_path: Path):
    """The judge knows the package by its place, because a clone may lie in a folder called gsm."""
    clone = tmp_path / "ü x/gsm"
    for name in ("src/gsm", "kernels/gsm_kernels", "tests/adversary"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("*.safetensors", "numba-*"))
    done = in_its_own_process("adversary.canaries", root=clone)
    assert done.returncode == 0, done.stderr
    for name, (end, said) in json.loads(done.stdout).items():
        assert end == "failed" and said.startswith(name), f"{name}: {end}, {said}"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a busy machine is no mistake of a case
def test_no_case_of_a_sample_fails():
    """Try a few cases of every class, in about a minute on a quiet machine."""
    done = in_its_own_process("adversary", "cases=45", "seed=5000")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_kill_loses_anything():
    """One of each kind."""
    done = in_its_own_process("adversary", "cases=0", "kills=5", "seed=20")
    assert done.returncode == 0 and "| kills | killed" in done.stdout, done.stdout + done.stderr


def test_the_judge_of_kills_sees_every_difference():
    curve = ["step,name,value", "3,val/loss,2.0", "6,train/loss,1.5", "6,val/loss,1.0"]
    whole = {"a/metrics.csv": curve, "a/model.safetensors": b"one", "results.md": b"a"}
    assert not difference(whole, whole)
    for other in (
        {**whole, "results.md": b"b"},
        {**whole, "a/model.safetensors": b"two"},
        {**whole, "a/metrics.csv": curve[:-1]},
        {**whole, "a/.state.json.1.partial": b""},
        {name: value for name, value in whole.items() if name != "results.md"},
    ):
        assert difference(other, whole) and difference(whole, other), other.keys()


def test_a_run_may_do_without_loggers_and_callbacks(tmp_path: Path):
    """No curve and no checkpoint are left then, as was asked for."""
    given = arguments(home_of(tmp_path), "bare", "trainer.max_steps=2", "~logger", "~callbacks")
    config = compose([word for word in given if not word.startswith("callbacks.")])
    assert config["logger"] == config["callbacks"] == {}
    facts = train(config)
    assert facts["status"] == "finished" and facts["steps"] == 2
    assert {path.name for path in Path(config["folder"]).rglob("*") if path.is_file()} == {
        "summary.json",
        "config.yaml",
    }


def home_of(folder: Path) -> Path:
    """A folder with text to train on."""
    (folder / "text").mkdir()
    tiny_text.write(folder / "text")
    return folder


@pytest.mark.parametrize("word", ["logs=''", "name=../../x", "folder=/"])
def test_nothing_is_written_before_a_place_was_looked_at(word: str, tmp_path: Path, processes: Any):
    """Hydra makes the folder of a run itself, before the configuration is checked as a whole."""
    done = typed(processes, tmp_path, "train.py", f"logs={tmp_path / 'a/b'}", word)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())
