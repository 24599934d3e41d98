"""An experiment as a user runs it: all of it, with real runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_text
from short_runs import BYTES, NO_PICTURES, SIZES
from test_experiment import TOY, configs, place, read_csv, until

from gsm.checkpoint import newest
from gsm.experiments.table import read_runs
from gsm.paths import ROOT

TINY = [*SIZES, *BYTES, "data.batch_size=2", "data.validation_sequences=3"]
TINY += ["trainer=cpu", "ngrams=false", "sample=false", NO_PICTURES]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_experiment_from_an_interruption_to_its_table(tmp_path: Path):
    """Stopped while its second arm trains, and given again; its third composes, but breaks as it trains."""
    broken = "  lost: [optimizer.learning_rate=1000]\nseeds:"
    directory = configs(tmp_path, TOY.replace("seeds:", broken))
    (tmp_path / "text").mkdir()
    text = tiny_text.write(tmp_path / "text")
    given = ["experiment=toy", *TINY, f"data.path={text}", f"data.cache_dir={tmp_path / 'cache'}"]
    given += [
        f"logs={tmp_path / 'logs'}",
        "trainer.max_steps=15",
        "trainer.log_every_n_steps=1",
        "callbacks.latest.minutes=1e-9",
        "seeds=1",
    ]
    command = [sys.executable, str(ROOT / "train.py"), "--config-dir", str(directory), *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def type_in(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, *more], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    parent = type_in("arm=[plain,mhc]")
    until(lambda: any(map(newest, (tmp_path / "logs/toy").glob("mhc-seed0-*"))), seconds=300)
    parent.terminate()
    printed = output(parent)
    assert parent.returncode == 128 + signal.SIGTERM, printed
    assert "to go on:" in printed
    status = {run.arm: run.summary["status"] for run in read_runs(tmp_path / "logs/toy")}
    assert status == {"plain": "finished", "mhc": "interrupted"}

    parent = type_in("jobs=2", "table=[val_loss]")
    printed = output(parent)
    assert parent.returncode == 1, printed
    assert "skipped: plain-seed0" in " ".join(printed.split())
    assert "failed: lost-seed0; to try again" in printed
    assert "Going on with the unfinished run" in (place(tmp_path, "mhc-seed0") / "train.log").read_text()
    assert [(row["arm"], row["seed"]) for row in read_csv(tmp_path)] == [("mhc", "0"), ("plain", "0")]
    assert "val_loss" in printed and "bits_per_byte" not in printed.partition("tensorboard --logdir")[0]


def output(process: subprocess.Popen[str]) -> str:
    """All of it, once the process has ended; one that does not end is ended."""
    try:
        return process.communicate(timeout=400)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise
