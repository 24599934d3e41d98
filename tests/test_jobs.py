"""The processes of an experiment: they end with their parent, and all of their output is seen."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_experiment import until

from gsm.experiments.jobs import Child, work_off
from gsm.experiments.runs import Run
from gsm.signals import answered


class Command(Run):
    """A run whose process is any command."""

    @property
    def command(self) -> tuple[str, ...]:
        return self.arguments


def command(place: Path, label: str, *words: str, **more: Any) -> Command:
    return Command(place, label, label, "train", (sys.executable, "-S", "-c", *words), **more)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_no_run_outlives_a_parent_that_was_killed(tmp_path: Path):
    trains = "import gsm.signals as c, os, pathlib, sys, time; c.leave_with_parent(); "
    trains += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    waits = "import gsm.experiments.jobs as c, pathlib, sys\nclass Run: typed, after, config = '', None, None\n"
    waits += (
        "run = Run(); run.find_log = lambda: pathlib.Path(sys.argv[1]).parent / 'log'; run.finished = lambda: False\n"
    )
    waits += f"run.command = (sys.executable, '-c', {trains!r}, sys.argv[1]); c.work_off([run], 1, c.Child, print)"
    ready = tmp_path / "ready"
    parent = subprocess.Popen([sys.executable, "-c", waits, str(ready)])
    until(lambda: ready.exists() and bool(ready.read_text()))
    parent.kill()
    parent.wait()
    until(lambda: not running(int(ready.read_text())))


def test_output_that_comes_last_is_seen_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    ends: list[tuple[str, int | None]] = []
    code = "print('gr\\u00f6\\u00dfer'); raise SystemExit(3)"
    start = lambda run: Child(run, {"PYTHONIOENCODING": "utf-8"}, follow=True)  # noqa: E731
    ended = lambda run, code, child: ends.append((run.label, code))  # noqa: E731
    assert work_off([command(tmp_path, "mine", code)], 1, start, ended) is None
    assert ends == [("mine", 3)]
    assert capfd.readouterr().out.splitlines()[-1] == "größer"


def test_a_run_waits_for_the_run_before_it_and_is_not_started_where_that_has_failed(tmp_path: Path):
    """The third run is free to begin while the second waits for the first."""

    def made(name: str, code: str, after: Run | None = None) -> Run:
        return command(tmp_path, name, code, after=after)

    first = made("first", f"import time; time.sleep(0.5); open({str(tmp_path / 'made')!r}, 'w')")
    second = made("second", f"open({str(tmp_path / 'made')!r})", first)
    broken = made("broken", "raise SystemExit(3)")
    lost = made("lost", "", broken)
    ends: list[tuple[str, int | None]] = []
    runs = [second, first, broken, lost, made("later", "", lost)]
    assert work_off(runs, 2, Child, lambda run, code, child: ends.append((run.label, code))) is None
    assert ends == [("broken", 3), ("lost", None), ("later", None), ("first", 0), ("second", 0)]
    assert not lost.find_folder().exists()


def test_a_run_gets_what_its_parent_has_composed(tmp_path: Path):
    """It composed again, perhaps hours later, when somebody had edited a yaml for the next experiment."""
    config = {"seed": 3, "rate": 1e-05, "by_step": {10: None}, "words": ["1e-05", "${it}", "null"]}
    code = "import gsm.config.handed as c; first = c.take_over(); print([first, c.take_over()])"
    child = Child(Command(tmp_path, "mine", "0", "train", (sys.executable, "-c", code), config=config))
    until(lambda: child.poll() is not None)
    assert child.log.read_text().splitlines()[-1] == str([config, None])


def running(process: int) -> bool:
    """Return False also for a process that has ended without being waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_hangup_is_answered_unless_the_process_was_started_to_outlive_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.SIGHUP in answered()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert answered() == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    signal.signal(signal.SIGHUP, before)
