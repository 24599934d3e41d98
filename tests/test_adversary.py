"""The attack of tests/adversary, in samples; and what is known to fail, each by the number of its class.

``make adversary ARGS="cases=2000"`` is the whole of it; ``ARGS="class=2 seed=123"`` tries one case again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from short_runs import arguments, count_calls, lines, no_death, started

from gsm.config.compose import compose
from gsm.evaluation.task_files import find, read_task
from gsm.paths import ROOT
from gsm.training.module import LanguageModeling

DANGEROUS = ("1", "2", "4", "5", "10")


def in_its_own_process(*words: str) -> subprocess.CompletedProcess[str]:
    """A module of the attack, as a command: it forks, which a process with threads must not."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command, there = [sys.executable, "-m", *words], os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, check=False)


def attack(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What became of a sample's cases."""
    done = in_its_own_process("adversary", f"class={','.join(DANGEROUS)}", *words, f"json={folder / 'ends.json'}")
    assert (folder / "ends.json").is_file(), done.stdout + done.stderr
    return json.loads((folder / "ends.json").read_text())


def failures(ends: list[dict[str, Any]], number: str) -> list[str]:
    """The cases of a class that failed, and how to see them again."""
    found = [end for end in ends if end["number"] == number]
    assert found, f"class {number} was not tried"
    return [
        f"class={number} seed={end['seed']}: {end['title']}: {end['said']}" for end in found if end["end"] == "failed"
    ]


def test_the_judge_sees_what_it_is_there_for():
    done = in_its_own_process("adversary.canaries")
    assert done.returncode == 0, done.stderr
    for name, (end, said) in json.loads(done.stdout).items():
        assert end == "failed" and said.startswith(name), f"{name}: {end}, {said}"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return attack(tmp_path_factory.mktemp("sample"), "cases=90", "seed=5000")


@pytest.mark.parametrize("number", DANGEROUS)
def test_no_case_of_a_dangerous_class_fails(number: str, sample: list[dict[str, Any]]):
    assert not failures(sample, number)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nor_of_a_larger_sample(tmp_path: Path):
    ends = attack(tmp_path, "cases=500", "seed=6000")
    assert not [failure for number in DANGEROUS for failure in failures(ends, number)]


@pytest.mark.slow
def test_a_kill_in_the_last_validation_loses_nothing(home: Path, processes: Any, straight: Path):
    log = home / "last_step.log"
    child = started(processes, arguments(home, "last_step"), log, killed_in_the_last_validation)
    child.join()
    assert child.exitcode == -signal.SIGKILL, log.read_text()
    child = started(processes, arguments(home, "last_step"), log, no_death)
    child.join()
    assert child.exitcode == 0, log.read_text()
    assert lines(home / "logs/last_step/gsm/seed0") == lines(straight)


def killed_in_the_last_validation() -> None:
    """The fourth validation, which has one batch."""
    reached = count_calls(4)

    def step(self: Any, *given: Any, whole: Callable[..., None] = LanguageModeling.validation_step) -> None:
        if reached():
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *given)

    LanguageModeling.validation_step = step


# What is known to fail, in parts that are about to be replaced.


@pytest.mark.parametrize("word", ["optimizer=null", "model=null", "data=null", "trainer=null"])
@pytest.mark.xfail(reason="class 11: a group that is null is a raw traceback", strict=True)
def test_a_group_that_is_null_is_named(word: str):
    with pytest.raises(ValueError, match=word.partition("=")[0]):
        compose(["size=pico", word])


@pytest.mark.parametrize("word", ["~optimizer", "~model", "~data", "~trainer"])
@pytest.mark.xfail(reason="class 11: a group that is left out is found too late", strict=True)
def test_a_group_that_is_left_out_is_named(word: str):
    with pytest.raises(ValueError, match=word[1:]):
        compose(["size=pico", word])


@pytest.mark.parametrize("word", ["name=../../x", "arm=../../up", "name=.replaced", "name=null", "arm=null", "name=''"])
@pytest.mark.xfail(reason="class 12: names lead out of the folder of logs, or to what is kept there", strict=True)
def test_a_name_is_one_folder(word: str, tmp_path: Path):
    with pytest.raises(ValueError, match=word.partition("=")[0]):
        compose(["size=pico", f"logs={tmp_path / 'logs'}", word])


@pytest.mark.xfail(reason="class 12: an empty folder of logs is the root of the disk", strict=True)
def test_logs_are_somewhere():
    with pytest.raises(ValueError, match="logs"):
        compose(["size=pico", "logs=''"])


@pytest.mark.xfail(reason="class 13: a tag in a task file is a raw ConstructorError", strict=True)
def test_a_tag_in_a_task_file_is_named(tmp_path: Path):
    path = tmp_path / "task.yaml"
    path.write_text("documents: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match=r"task\.yaml, line 1"):
        read_task(path)


@pytest.mark.xfail(reason="class 13: a task names documents outside of data=", strict=True)
def test_the_documents_of_a_task_lie_in_its_folder(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.jsonl").write_text("{}\n")
    with pytest.raises((ValueError, FileNotFoundError)):
        find(tmp_path / "data", "../secret")
