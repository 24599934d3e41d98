"""The processes of an experiment: they end with their parent, and all that they say is seen."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_experiment import until

from gsm.experiments.jobs import Child, Job, work_off


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_no_run_outlives_a_parent_that_was_killed(tmp_path: Path):
    trains = "import gsm.experiments.jobs as c, os, pathlib, sys, time; c.leave_with_parent(); "
    trains += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    waits = "import gsm.experiments.jobs as c, pathlib, sys; log = pathlib.Path(sys.argv[1]).with_name('log'); "
    waits += f"job = c.Job('', (sys.executable, '-c', {trains!r}, sys.argv[1]), log); "
    waits += "c.work_off([job], 1, c.Child, print)"
    ready = tmp_path / "ready"
    parent = subprocess.Popen([sys.executable, "-c", waits, str(ready)])
    until(lambda: ready.exists() and bool(ready.read_text()))
    parent.kill()
    parent.wait()
    until(lambda: not running(int(ready.read_text())))


def test_output_that_comes_last_is_seen_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    ends: list[tuple[str, int | None]] = []
    command = (sys.executable, "-S", "-c", "print('gr\\u00f6\\u00dfer'); raise SystemExit(3)")
    start = lambda job: Child(job, {"PYTHONIOENCODING": "utf-8"}, follow=True)  # noqa: E731
    told = lambda job, code, child: ends.append((job.name, code))  # noqa: E731
    assert work_off([Job("mine", command, tmp_path / "log")], 1, start, told) is None
    assert ends == [("mine", 3)]
    assert capfd.readouterr().out.splitlines()[-1] == "größer"


def test_a_job_waits_for_what_it_comes_after_and_is_not_started_where_that_has_failed(tmp_path: Path):
    """The third job is free to begin while the second waits for the first."""

    def job(name: str, code: str, after: Job | None = None) -> Job:
        return Job(name, (sys.executable, "-S", "-c", code), tmp_path / f"{name}.log", after)

    first = job("first", f"import time; time.sleep(0.5); open({str(tmp_path / 'made')!r}, 'w')")
    second = job("second", f"open({str(tmp_path / 'made')!r})", first)
    broken = job("broken", "raise SystemExit(3)")
    lost = job("lost", "", broken)
    ends: list[tuple[str, int | None]] = []
    jobs = [second, first, broken, lost, job("later", "", lost)]
    assert work_off(jobs, 2, Child, lambda job, code, child: ends.append((job.name, code))) is None
    assert ends == [("broken", 3), ("lost", None), ("later", None), ("first", 0), ("second", 0)]
    assert not (tmp_path / "lost.log").exists()


def test_a_job_that_is_to_end_is_ended_and_no_other(tmp_path: Path):
    sleeps = "import time; time.sleep(60)"
    jobs = [Job(name, (sys.executable, "-S", "-c", code), tmp_path / name) for name, code in (("a", sleeps), ("b", ""))]
    ends: dict[str, int | None] = {}
    told = lambda job, code, child: ends.update({job.name: code})  # noqa: E731
    assert work_off(jobs, 1, Child, told, lambda job: job.name == "a") is None
    assert ends == {"a": -signal.SIGTERM, "b": 0}


def running(process: int) -> bool:
    """Also false for one that has ended but that nobody has asked about."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
