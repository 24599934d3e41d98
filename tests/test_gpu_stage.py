"""`make gpu STAGE=tests`: what it counts, and what it makes of a sanitizer's findings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gsm.paths import ROOT
from gsm_kernels.benchmark import machine


def gpu_stage() -> Any:
    """`benchmarks/gpu_tests.py`, a script, as a module."""
    specification = importlib.util.spec_from_file_location("gpu_tests", ROOT / "benchmarks/gpu_tests.py")
    assert specification is not None and specification.loader is not None
    stage = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(stage)
    return stage


def test_the_stage_of_tests_counts_file_by_file(tmp_path):
    stage = gpu_stage()
    (tmp_path / "ops").mkdir()
    source = "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\ndef test_c(): pytest.skip('no')\n"
    path = tmp_path / "ops/test_some.py"
    path.write_text(source)
    found = stage.run_file(path)
    assert (found["passed"], found["skipped"], list(found["failed"])) == (1, 1, ["test_b"])
    assert found["failed"]["test_b"].startswith("assert 1 == 2")
    path.write_text("import os\nos._exit(3)\n")
    assert stage.run_file(path)["failed"] == {"test_some.py": "exit status 3"}
    assert Path(ROOT / "tests/ops/test_triton.py") in stage.files()


def test_a_file_that_does_not_end_is_ended_with_all_that_it_started(tmp_path):
    stage, mark, path = gpu_stage(), tmp_path / "mark", tmp_path / "test_some.py"
    path.write_text(
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '99'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(child.pid))\ntime.sleep(99)"
    )
    with pytest.raises(KeyboardInterrupt):
        stage.ended([sys.executable, str(path)], 3)
    child, end = int(mark.read_text()), time.monotonic() + 10
    while runs(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(child)


def runs(process: int) -> bool:
    """Whether a process of this number is there, and is more than what is left of one that has ended."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return done.stdout.strip()[:1] not in ("", "Z")


def test_what_has_failed_is_tried_behind_the_others(tmp_path, monkeypatch):
    stage, ran = gpu_stage(), []

    def run_file(path, *_):
        ran.append(path.stem)
        return {"seconds": 1.0, "failed": {"test_a": "no"} if path.stem == "a" else {}}

    monkeypatch.setattr(machine, "chosen", torch.device)
    monkeypatch.setattr(machine, "facts", lambda device: {"device": "a GPU"})
    monkeypatch.setattr(stage, "jobs", lambda: [stage.Job(name, Path(name)) for name in names])
    monkeypatch.setattr(stage, "run_file", run_file)
    names = "ab"
    assert stage.main(False, str(tmp_path / "a.json")) == 1
    names = "abc"
    assert stage.main(False, str(tmp_path / "a.json")) == 1 and ran == ["a", "b", "c", "a"]


@pytest.mark.slow
def test_a_process_that_lost_the_gpu_is_replaced_by_another(tmp_path, monkeypatch):
    pytest.importorskip("xdist")
    stage = gpu_stage()
    monkeypatch.setattr(stage, "WORKERS", 2)
    (tmp_path / "ops").mkdir()
    source = (ROOT / "tests/conftest.py").read_text().partition("# For tests of how runs end")[0]
    lost = "torch.cuda.is_initialized = lambda: True\ndef lost(): raise RuntimeError('CUDA error')\n"
    (tmp_path / "ops/conftest.py").write_text(source)
    tests = "".join(f"def test_{n}(): assert torch.cuda.synchronize is not lost\n" for n in range(20))
    astray = "def test_astray():\n    torch.cuda.synchronize = lost\n    assert False\n"
    (tmp_path / "ops/test_some.py").write_text(f"import torch\n{lost}{astray}{tests}")
    found = stage.run_file(tmp_path / "ops/test_some.py")
    assert found["passed"] == 20 and set(found["failed"]) == {"test_astray"}


def test_what_a_sanitizer_finds_fails_though_every_test_has_passed(tmp_path, monkeypatch):
    stage = gpu_stage()
    (tmp_path / "ops").mkdir()
    path = tmp_path / "ops/test_some.py"
    path.write_text("def test_a(): pass\n")
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\nshift 4\n"$@"\necho "========= ERROR SUMMARY: 2 errors"\nexit 99\n')
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    checks = [job for job in stage.jobs() if job.runner]
    assert [job.name for job in checks] == ["compute-sanitizer memcheck", "compute-sanitizer racecheck"]
    found = stage.run_file(path, runner=checks[0].runner)
    assert (found["passed"], found["failed"]) == (1, {"compute-sanitizer": "========= ERROR SUMMARY: 2 errors"})
