"""Runs of an experiment that are several processes each, on one machine or on several: phases follow one another, and
what is interrupted goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from test_experiment import composed as toy

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.experiments.execute import started_by
from gsm.experiments.jobs import Child, tail
from gsm.experiments.runs import Experiment, Run
from gsm.paths import ROOT
from gsm.training import trainer as trainers

PYTHON = f'"{sys.executable}"'  # in quotes, since the clone with its environment may lie anywhere
TORCHRUN = f'"{Path(sys.executable).parent / "torchrun"}"'
WORDS = [
    "trainer=context", "trainer.accelerator=cpu", "size=pico", "data=needle", "optimizer=adamw", "data.batch_size=2",
    "trainer.max_steps=80", "trainer.val_check_interval=40", "trainer.log_every_n_steps=4",
    "callbacks.latest.minutes=1e-9", "callbacks.latest.share=1e9", "callbacks.pictures=null", "ngrams=false",
    "sample=false",
    "++runs={train: null, extend: {after: train, trainer.max_steps: 4}}", "name=phases",
]  # fmt: skip
FOLDER = "phases/*/seed0"
# What srun does on two nodes: the same command on each, which find one another by the first one's address.
NODES = """#!/bin/sh
for node in 0 1; do
  {torchrun} --nnodes=2 --node-rank=$node --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={port} "$@" &
done
wait %1 && wait %2
"""

# Training, as far as signals go.
WORKER = """
import signal, sys, time
from gsm.signals import leave_with_parent
leave_with_parent()
def save(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
time.sleep(60)
"""


def started(logs: Path, starter: str) -> subprocess.Popen[str]:
    words = [*WORDS, f"logs={logs}", f"starter='{starter}'"]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def steps_of(folder: Path) -> dict[str, int]:
    return {run: json.loads((folder / run / "summary.json").read_text())["steps"] for run in ("train", "extend")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_phases_of_several_processes_follow_one_another_and_go_on_after_a_signal(tmp_path: Path):
    first = started(tmp_path, f"{TORCHRUN} --standalone --nproc-per-node=2")
    end = time.monotonic() + 200
    while not [*tmp_path.glob(f"{FOLDER}/train/checkpoints/last.ckpt")] and time.monotonic() < end:
        time.sleep(0.2)
    (folder,) = tmp_path.glob(FOLDER)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=100)
    assert first.returncode != 0 and "Traceback" not in said.partition("torch/distributed")[0], said
    summary = json.loads((folder / "train/summary.json").read_text())
    assert summary["status"] == "interrupted" and 0 < summary["steps"] < 80, said
    again = started(tmp_path, f"{TORCHRUN} --standalone --nproc-per-node=2")
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and "Going on with the unfinished run" in said, said
    assert steps_of(folder) == {"train": 80, "extend": 4}
    command = f"{TORCHRUN} --standalone --nproc-per-node=2"
    assert "device   2 x " in said and command.replace('"', "") in said.replace("'", "").replace('"', "")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_may_be_one_of_several_nodes(tmp_path: Path):
    nodes = tmp_path / "nodes.sh"
    nodes.write_text(NODES.format(torchrun=TORCHRUN, port=29587))
    nodes.chmod(0o755)
    done = started(tmp_path, str(nodes))
    said, _ = done.communicate(timeout=400)
    assert done.returncode == 0, said
    (folder,) = tmp_path.glob(FOLDER)
    assert steps_of(folder) == {"train": 80, "extend": 4} and "device   2 x " in said


@pytest.mark.parametrize("starter", ["no_such_command --here", "torchrun 'unclosed"])
def test_a_starter_that_is_no_command_is_refused(starter: str):
    with pytest.raises(ConfigError, match="^starter is "):
        started_by(starter)


def test_without_one_it_is_this_python():
    assert started_by(None) == [sys.executable]


def test_what_starts_others_hears_of_every_signal_and_of_ctrl_c_as_of_a_wish_to_end(tmp_path: Path):
    """srun answers the first SIGINT by telling how its tasks are."""
    said = 'trap "echo TERM" TERM; trap "echo USR1" USR1; echo ready; sleep 2 & wait; wait; wait'
    child = Child(Run("one", tmp_path, ("/bin/bash", "-c", said), starter=True))
    for count, wanted in ((1, "USR1"), (2, "TERM")):
        while len(tail(child.log)) <= count:  # the line of the command, and what it has said so far
            time.sleep(0.05)
        child.forward([signal.SIGUSR1, signal.SIGINT][:count])
        end = time.monotonic() + 5
        while wanted not in tail(child.log) and time.monotonic() < end:
            time.sleep(0.05)
        assert tail(child.log)[-1] == wanted
    while child.poll() is None:
        time.sleep(0.05)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("starter", [TORCHRUN, f"{PYTHON} -m torch.distributed.run"])
def test_torchrun_passes_on_a_clusters_warning_however_it_is_started(tmp_path: Path, starter: str):
    """Unless told to, it dies of this signal at once, and its workers stay. Workers are not this process's children:
    told to leave with it, they would at once."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    words = (*started_by(starter), "--standalone", "--nproc-per-node=1", str(worker))
    child = Child(Run("one", tmp_path, words, starter=True))
    try:
        assert until(lambda: "ready" in tail(child.log), 90), tail(child.log)
        child.forward([signal.SIGUSR1])
        assert until(lambda: child.poll() is not None, 60)
        assert "saved" in (tmp_path / "evaluate.log").read_text().splitlines(), tail(child.log)
    finally:
        child.forward([signal.SIGUSR1, signal.SIGTERM])


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_what_starts_others_leaves_with_a_parent_that_was_killed(tmp_path: Path):
    log = tmp_path / "evaluate.log"
    program = f"""
import time
from pathlib import Path
from types import SimpleNamespace
from gsm.experiments import jobs
said = "trap 'echo TERM; exit' TERM; echo $$; sleep 100 & wait"
jobs.Child(SimpleNamespace(log=Path({str(log)!r}), command=("/bin/bash", "-c", said), starter=True))
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        said = until(lambda: log.is_file() and tail(log)[1:])
        parent.kill()
    assert said and said[0].isdigit()
    assert until(lambda: tail(log)[2:]) == ["TERM"]


@pytest.mark.parametrize("starter", [None, f"{PYTHON} -m torch.distributed.run"])
@pytest.mark.parametrize("runs", [[], ["++runs={train: null}"]])
def test_an_experiments_trainings_know_whether_they_have_a_starter(
    tmp_path: Path, starter: str | None, runs: list[str]
):
    given = ["size=pico", "data=needle", "trainer=cpu", f"logs={tmp_path}", *runs]
    given += [f"starter='{starter}'"] if starter else []
    (trial,) = Experiment(compose(given), given, started_by(starter)).trials()
    (run,) = trial.runs.values()
    assert run.command[0] == sys.executable and run.starter == bool(starter)


def until(found: Callable[[], Any], seconds: float = 20) -> Any:
    """What is found in the end, or nothing."""
    end = time.monotonic() + seconds
    while not (what := found()) and time.monotonic() < end:
        time.sleep(0.05)
    return what


def test_a_run_of_an_experiment_whose_yaml_has_a_starter_has_none(tmp_path: Path):
    """It took itself for an experiment, and would have started itself again."""
    yaml = "# @package _global_\narms: {plain: [model/residual=plain]}\ntable: [val_loss]\nstarter: 'true --here'\n"
    (trial,) = toy(tmp_path, text=yaml).trials()
    assert trial.config["starter"] is None and "starter=null" in trial.overrides


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
