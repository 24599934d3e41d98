"""`make gpu STAGE=tests`: what it counts, and what it makes of a sanitizer's findings."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from gsm.paths import ROOT


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
