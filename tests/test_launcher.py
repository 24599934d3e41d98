"""Experiments on a cluster: the jobs of one of Hydra's launchers, and their ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from omegaconf import DictConfig, OmegaConf
from test_experiment import TOY, configs, fake, place, read_csv, signal_when, starts, toy
from test_experiment_cli import TINY, output

from gsm.config import compose as composing
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.experiments import execute as experiments
from gsm.experiments import launcher
from gsm.experiments.execute import train_all
from gsm.experiments.runs import Run
from gsm.paths import ROOT

__all__ = ["fake"]  # a fixture


class InTurn:
    """A launcher that runs its jobs one after another, in this process, as Hydra would call them."""

    def __init__(self, task: Callable[[DictConfig], object]) -> None:
        self.task = task
        self.given: list[list[str]] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        return [self.run(list(overrides)) for overrides in job_overrides]

    def run(self, overrides: list[str]) -> JobReturn:
        self.given.append(overrides)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HydraConfig, "get", lambda: hydra_node(task=overrides))
            return JobReturn(status=JobStatus.COMPLETED, _return_value=self.task(DictConfig({})))


def hydra_node(task: Sequence[str] = (), hydra: Sequence[str] = (), name: str = "submitit_slurm") -> SimpleNamespace:
    overrides = SimpleNamespace(task=list(task), hydra=list(hydra))
    return SimpleNamespace(overrides=overrides, runtime=SimpleNamespace(choices={"hydra/launcher": name}), mode=None)


class KilledAtTheSecond(InTurn):
    """As submitit does: it raises at the first job that has not come back, whatever the others did."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        for overrides in job_overrides[:2]:
            self.run(list(overrides))
        raise RuntimeError("job 17_1 was killed by the cluster\nits log: ...")


@pytest.fixture
def made(tmp_path: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch, request: Any) -> list[InTurn]:
    """The launchers that Hydra was asked for, of the kind that the test has as its parameter."""
    found: list[InTurn] = []

    def make(plugins: object, context: object, task: Callable[[DictConfig], object], config: object) -> InTurn:
        found.append(getattr(request, "param", InTurn)(task))
        return found[-1]

    monkeypatch.setattr(Plugins, "instantiate_launcher", make)
    monkeypatch.setattr(GlobalHydra, "config_loader", lambda self: None)
    node = {"runtime": {"choices": {"hydra/launcher": "submitit_slurm"}}, "overrides": {"task": []}}
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": node}))
    return found


def test_every_waiting_run_goes_to_the_launcher_at_once_as_a_child_would_get_it(
    tmp_path: Path, fake: list[str], made: list[InTurn]
):
    experiment = toy(tmp_path, script=fake)
    train_all(experiment, "submitit_slurm")
    assert made[0].given == [list(trial.overrides) for trial in experiment.trials()]
    log = (place(tmp_path, "plain/seed1") / "train.log").read_text().splitlines()
    assert log[0].startswith("$ ") and "arm=plain seed=1" in log[0]
    assert len(read_csv(tmp_path)) == 4
    train_all(toy(tmp_path, script=fake), "submitit_slurm")
    assert len(made) == 1, "nothing waits, so nothing is handed over"


def test_a_job_that_fails_loses_no_other_and_a_second_command_sends_it_alone(
    tmp_path: Path, fake: list[str], made: list[InTurn], capsys: pytest.CaptureFixture[str]
):
    place(tmp_path, "mhc").mkdir(parents=True)
    (place(tmp_path, "mhc") / "fails").touch()
    with pytest.raises(SystemExit) as stopped:
        train_all(toy(tmp_path, script=fake), "submitit_slurm")
    assert stopped.value.code == 1
    printed = capsys.readouterr().out
    assert "[1/4] mhc/seed0: has not come to its end\n" in printed
    assert "failed: mhc/seed0, mhc/seed1; to try again" in printed
    assert "  it broke, as told" in printed
    assert [row["arm"] for row in read_csv(tmp_path)] == ["plain", "plain"]
    (place(tmp_path, "mhc") / "fails").unlink()
    train_all(toy(tmp_path, script=fake), "submitit_slurm")
    given = [[word for word in words if word.startswith(("arm=", "seed="))] for words in made[1].given]
    assert given == [["arm=mhc", "seed=0"], ["arm=mhc", "seed=1"]]


def test_what_another_submission_has_finished_is_not_trained_again(tmp_path: Path, fake: list[str], made: list[InTurn]):
    """The parent was killed while its jobs waited in the queue, and the same command put them there once more."""
    trial = toy(tmp_path, script=fake).trials()[0]
    task = launcher.LauncherTask({trial.overrides: [trial.runs[""]]})
    for _ in range(2):
        InTurn(task).run(list(trial.overrides))
    assert starts(tmp_path) == {"mhc/seed0": 1}


def test_the_launchers_own_handler_is_called_once_the_run_has_saved(tmp_path: Path, made: list[InTurn]):
    """submitit queues a job again when it hears the cluster's warning, and ends the process there and then."""
    run = (
        "import pathlib, signal, sys, time; here = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGUSR2, lambda *_: [time.sleep(0.3), (here / 'saved').touch(), sys.exit(140)])\n"
        "(here / 'ready').touch(); time.sleep(60)"
    )
    heard: list[bool] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append((tmp_path / "saved").exists()))
    warning = threading.Thread(target=signal_when, args=(tmp_path / "ready", os.getpid(), signal.SIGUSR2))
    try:
        warning.start()
        one = Run("mhc", tmp_path, (sys.executable, "-S", "-c", run, str(tmp_path)))
        InTurn(launcher.LauncherTask({("arm=mhc",): [one]})).run(["arm=mhc"])
    finally:
        warning.join()
        signal.signal(signal.SIGUSR2, before)
    assert heard == [True]


def test_what_starts_after_one_another_is_one_part_with_all_arms_that_share_it(tmp_path: Path):
    def made(name: str, after: Run | None = None) -> Run:
        return Run(name, tmp_path, (), after)

    train, other = made("one/train"), made("other")
    tunes = [made("one/tune", train), made("two/tune", train)]
    trials = [
        experiments.Trial("one", 0, {}, ("one",), {"train": train, "tune": tunes[0]}),
        experiments.Trial("other", 0, {}, ("other",), {"": other}),
        experiments.Trial("two", 0, {}, ("two",), {"train": train, "tune": tunes[1]}),
    ]
    waiting = [train, tunes[0], other, tunes[1]]
    assert experiments._parts(trials, waiting) == {("other",): [other], ("one",): [train, *tunes]}
    assert experiments._parts(trials, [other, tunes[1]]) == {("other",): [other], ("two",): [tunes[1]]}


def test_the_runs_themselves_are_not_told_of_the_launcher(monkeypatch: pytest.MonkeyPatch):
    own = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=9", "hydra.mode=RUN", "hydra.verbose=true"]
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra_node(hydra=own))
    monkeypatch.setattr(sys, "argv", ["train.py", "experiment=toy", *own])
    assert experiments._script() == [sys.executable, "train.py", "hydra.verbose=true"]


def test_a_single_run_is_not_quietly_trained_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(HydraConfig, "get", hydra_node)
    with pytest.raises(ConfigError, match="^hydra/launcher=submitit_slurm is not allowed .* Use seeds=1"):
        launcher.refuse_single()


def test_a_launcher_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "PLUGIN", "hydra_plugins_of_nobody.launcher")
    with pytest.raises(ConfigError, match=r"^hydra/launcher=submitit_slurm needs the extra cluster: pip install"):
        launcher.check_available(["experiment=toy", "hydra/launcher=submitit_slurm"])


@pytest.mark.parametrize("line", ["hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=8"])
def test_a_job_of_several_processes_is_refused(line: str):
    with pytest.raises(ConfigError, match=f"^{line} is not allowed because a job is one process.*docs/slurm.sh"):
        launcher.check_available(["experiment=toy", line])
    launcher.check_available(["experiment=toy", "hydra/launcher=basic"])


def test_composing_a_configuration_leaves_hydra_as_it_was():
    """It was replaced by a copy that was not at work, and no launcher could be made from that. In an application of
    one's own, the jobs after the first composition had the name of ours."""
    before = Singleton.get_state()
    try:
        GlobalHydra.instance().hydra = cast(Any, "at work")
        JobRuntime.instance().set("name", "mine")
        composing._composed.cache_clear()
        compose([])
        assert (GlobalHydra.instance().hydra, JobRuntime.instance().get("name")) == ("at work", "mine")
    finally:
        Singleton.set_state(before)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_submitit_trains_an_experiment(tmp_path: Path):
    """With its local launcher, so without a cluster; one arm composes, but its weights are missing."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra cluster")
    import tiny_text

    (tmp_path / "text").mkdir()
    given = [*TINY, f"data.path={tiny_text.write(tmp_path / 'text')}", f"data.cache_dir={tmp_path / 'cache'}"]
    given += ["experiment=toy", f"logs={tmp_path / 'logs'}", "trainer.max_steps=2", "hydra/launcher=submitit_local"]

    arms = 'arms:\n  mhc: []\n  lost: ["start_from=/nowhere"]\nseeds: [0]'
    directory = configs(tmp_path, TOY[: TOY.index("arms:")] + arms + TOY.partition("seeds: [0, 1]")[2])
    command = [sys.executable, str(ROOT / "train.py"), "--config-dir", str(directory), *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    printed = output(parent)
    assert parent.returncode == 1, printed
    assert "2 runs go to submitit_local" in printed and "failed: lost/seed0; to try again" in printed
    assert "/nowhere" in printed
    assert [row["arm"] for row in read_csv(tmp_path)] == ["mhc"]


@pytest.mark.parametrize("made", [KilledAtTheSecond], indirect=True)
def test_a_launcher_that_gives_up_loses_no_run_that_was_finished(
    tmp_path: Path, fake: list[str], made: list[InTurn], capsys: pytest.CaptureFixture[str]
):
    """Its reason stood below every run, as if it were the end of that run's log."""
    place(tmp_path, "plain").mkdir(parents=True)
    (place(tmp_path, "plain") / "fails").touch()
    with pytest.raises(SystemExit):
        train_all(toy(tmp_path, script=fake), "submitit_slurm")
    printed = capsys.readouterr().out
    assert "[1/4] mhc/seed0: finished, bits_per_byte 1.0000" in printed
    assert "[2/4] plain/seed0: has not come to its end" in printed
    assert printed.count("submitit_slurm ended with RuntimeError: job 17_1 was killed by the cluster") == 1
    said = printed[printed.index("plain/seed0 failed; ") :].splitlines()
    assert said[0].endswith("plain/seed0/train.log:") and said[3] == "  it broke, as told"
    assert "mhc/seed1 failed; it has written no log" in said
    assert "failed: plain/seed0, mhc/seed1, plain/seed1; to try again" in printed
