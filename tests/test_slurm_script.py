"""The example for Slurm, with a cluster made of two lines of shell."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from gsm.config.compose import compose
from gsm.paths import ROOT


@pytest.mark.parametrize("code", [0, 1, 128 + signal.SIGTERM, 128 + signal.SIGUSR1])
def test_a_job_is_queued_again_when_it_was_warned_and_only_then(tmp_path: Path, code: int):
    for name, ends in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/{name}.given\nexit {ends}\n')
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(ROOT / "docs/slurm.sh"), "size=pico"], env=environment, check=False)
    assert done.returncode == code
    queued = tmp_path / "scontrol.given"
    assert queued.is_file() is (code == 128 + signal.SIGUSR1)
    assert not queued.is_file() or queued.read_text() == "requeue 17\n"
    given = (tmp_path / "srun.given").read_text().split()
    trainer = compose(given[given.index("train.py") + 1 :])["trainer"]
    assert (trainer["devices"], trainer["num_nodes"]) == (8, 2)
