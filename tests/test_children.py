"""The processes of an experiment: they end with their parent, and all that they say is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_experiment import until

from gsm.experiments.children import Child, work_off


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_no_run_outlives_a_parent_that_was_killed(tmp_path: Path):
    trains = "import gsm.experiments.children as c, os, pathlib, sys, time; c.leave_with_parent(); "
    trains += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    waits = "import gsm.experiments.children as c, pathlib, sys; log = pathlib.Path(sys.argv[1]).with_name('log'); "
    waits += (
        f"c.work_off([lambda: c.Child([sys.executable, '-c', {trains!r}, sys.argv[1]], log, {{}}, False)], 1, print)"
    )
    ready = tmp_path / "ready"
    parent = subprocess.Popen([sys.executable, "-c", waits, str(ready)])
    until(lambda: ready.exists() and bool(ready.read_text()))
    parent.kill()
    parent.wait()
    until(lambda: not running(int(ready.read_text())))


def test_output_that_comes_last_is_seen_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    ends: list[tuple[int, int]] = []
    command = [sys.executable, "-S", "-c", "print('gr\\u00f6\\u00dfer'); raise SystemExit(3)"]
    start = lambda: Child(command, tmp_path / "log", {"PYTHONIOENCODING": "utf-8"}, follow=True)  # noqa: E731
    assert work_off([start], 1, lambda number, child, code: ends.append((number, code))) is None
    assert ends == [(0, 3)]
    assert capfd.readouterr().out.splitlines()[-1] == "größer"


def running(process: int) -> bool:
    """Also false for one that has ended but that nobody has asked about."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
