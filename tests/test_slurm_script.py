"""The example for Slurm, with a cluster and a Python made of a few lines of shell."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from gsm.config.compose import compose
from gsm.paths import ROOT

PYTHON = """#!/bin/bash
trap 'exit {warned}' USR1
printf '%s\\n' "$@" > given.partly && mv given.partly given
{then}
"""
JOB = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17"}
WARNED = 128 + signal.SIGUSR1


def submitted(folder: Path, then: str) -> subprocess.Popen[bytes]:
    """The script, on a cluster where Python trains as ``then`` says."""
    programs = {
        "scontrol": f'#!/bin/sh\necho "$@" > {folder}/queued\n',
        ".venv/bin/python": PYTHON.format(warned=WARNED, then=then),
    }
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, **JOB, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", str(ROOT / "docs/slurm.sh"), "size=pico"], env=environment, cwd=folder)


@pytest.mark.parametrize("code", [0, 1, 128 + signal.SIGTERM, WARNED])
def test_a_job_is_queued_again_when_it_was_warned_and_only_then(tmp_path: Path, code: int):
    assert submitted(tmp_path, f"exit {code}").wait(30) == code
    queued = tmp_path / "queued"
    assert queued.is_file() is (code == WARNED)
    assert not queued.is_file() or queued.read_text() == "requeue 17\n"
    script, *words = (tmp_path / "given").read_text().splitlines()
    config = compose(words)
    assert script == "train.py" and config["starter"] == "srun --kill-on-bad-exit=1 .venv/bin/python"
    assert (config["trainer"]["devices"], config["trainer"]["num_nodes"]) == (8, 2)


def test_a_warning_reaches_the_training_and_the_script_waits_until_it_has_saved(tmp_path: Path):
    saves = "trap 'sleep 1; touch saved; exit 138' USR1; for i in $(seq 300); do sleep 0.1; done"
    job = submitted(tmp_path, saves)
    end = time.monotonic() + 20
    while not (tmp_path / "given").is_file() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)  # the second trap comes after what was given
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == WARNED
    assert (tmp_path / "saved").is_file() and (tmp_path / "queued").read_text() == "requeue 17\n"
