"""The example for Slurm, with a cluster and an srun made of a few lines of shell."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment

from gsm.config.compose import compose
from gsm.experiments import execute
from gsm.paths import ROOT
from gsm.training import trainer as trainers

SRUN = """#!/bin/bash
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
        "srun": SRUN.format(warned=WARNED, then=then),
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
    *program, script = (tmp_path / "given").read_text().splitlines()[:3]
    config = compose((tmp_path / "given").read_text().splitlines()[3:])
    assert program == ["--kill-on-bad-exit=1", ".venv/bin/python"] and script == "train.py"
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


def test_a_warning_to_an_experiment_reaches_submitit_once_its_runs_have_saved(monkeypatch: pytest.MonkeyPatch):
    """submitit's handler queues the job once more."""
    heard: list[int] = []
    monkeypatch.setattr(execute, "work_off", lambda *_: signal.SIGUSR2)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGUSR2)):
            execute._Work(SimpleNamespace(config={"jobs": 1}), []).execute()  # pyright: ignore[reportArgumentType]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2]


def test_a_login_node_is_not_told_to_use_srun_but_a_job_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "srun").write_text("#!/bin/sh")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    for job, told in ((None, 0), ("17", 1)):
        monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainers.quiet()
            assert not SLURMEnvironment.detect()
        assert len([one for one in caught if "srun" in str(one.message)]) == told
