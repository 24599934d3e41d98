"""A command works on when its terminal goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gsm import paths
from gsm.signals import answered

WITH = {**os.environ, "PYTHONPATH": str(paths.PACKAGE.parent)}
WRITES = """
import sys
from gsm import terminal
terminal.outlive()
for line in range(100):
    print(line, flush=True)
    print(line, file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("gone", ["pipe", "terminal"])
def test_a_command_outlives_the_reader_of_what_it_prints(tmp_path: Path, gone: str):
    """A terminal that was closed ended a training of hours, and the disk was called broken; so did `| head`."""
    reader, writer = os.openpty() if gone == "terminal" else os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", WRITES, str(tmp_path / "file")]
    done = subprocess.run(command, stdout=writer, stderr=writer, env=WITH, check=False)
    os.close(writer)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "done"


def test_a_full_disk_is_no_terminal():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", WRITES, os.devnull]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=WITH, check=False)
    assert done.returncode and "No space left on device" in done.stderr


def test_a_hangup_is_answered_unless_the_process_was_started_to_outlive_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.SIGHUP in answered()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert answered() == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    signal.signal(signal.SIGHUP, before)
