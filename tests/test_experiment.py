"""Experiments: the runs of one command, how they start, stop and go on, and their table."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from short_runs import folder_of, without_pictures
from stored import store

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.experiments import SEVERAL
from gsm.experiments import runs as planned
from gsm.experiments.execute import train_all
from gsm.experiments.runs import Experiment

TOY = """# @package _global_
# Does anything happen?
name: toy
arms:
  mhc: []
  plain: [model/residual=plain, model.state_size=9]
seeds: [0, 1]
table: [bits_per_byte, data.train_tokens]
"""

# A child that trains nothing. Files beside its folder make it fail or wait. It leaves the summary of a run, and a
# checkpoint that the test has prepared, since PyTorch takes seconds to import.
FAKE = """
import json, os, pathlib, re, shutil, signal, sys, time
given = dict(word.partition("=")[::2] for word in sys.argv[1:])
folder = pathlib.Path(re.search("^folder: (.*)$", os.environ["GSM_COMPOSED"], re.M)[1])
asked = lambda word: (folder.parent / (given["arm"] + "." + word)).exists()
print("threads", os.environ.get("OMP_NUM_THREADS"), flush=True)
with open(folder / "starts", "a") as file:
    file.write("x")
if asked("fails"):
    sys.exit("it broke, as told")
def leave(number, frame):
    (folder / "saved").write_text(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
while asked("waits"):
    (folder / "ready").touch()
    time.sleep(0.02)
value = {"mhc": 1.0, "plain": 2.0, "mhc_two_pass": 3.0}[given["arm"]] + int(given["seed"]) / 10
summary = {"status": "finished", "steps": 1, "bits_per_byte": value, "data": {"train_tokens": 12345}}
summary |= {"arm": given["arm"], "seed": int(given["seed"]), "model": "gsm"}
shutil.rmtree(folder / "checkpoints", ignore_errors=True)
stored = pathlib.Path(given["logs"]).parent / (given["arm"] + given["seed"])
shutil.copytree(stored / "checkpoints", folder / "checkpoints")
(folder / "summary.json").write_text(json.dumps(summary))
"""


def configs(folder: Path, text: str = TOY) -> Path:
    (folder / "configs/experiment").mkdir(parents=True, exist_ok=True)
    (folder / "configs/experiment/toy.yaml").write_text(text)
    return folder / "configs"


def composed(folder: Path, *given: str, text: str = TOY) -> Experiment:
    """Return the experiment as the command line makes it; every configuration takes half a second."""
    directory = configs(folder, text)
    overrides = ["experiment=toy", f"logs={folder / 'logs'}", *given]
    with pytest.MonkeyPatch.context() as patch:  # as --config-dir is noted
        patch.setenv("GSM_CONFIGS", str(directory))
        experiment = Experiment(compose(overrides), overrides)
        experiment.trials()
    return experiment


def toy(folder: Path, *given: str, text: str = TOY) -> Experiment:
    """The same, with the checkpoints that its runs will leave."""
    experiment = composed(folder, *given, text=text)
    for trial in experiment.trials():
        run = folder / f"{trial.arm}{trial.seed}"
        store(run, training_state={}, started_from=None, hyper_parameters={"config": trial.config})
    return experiment


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that takes a tenth of a second in place of a training."""
    monkeypatch.setenv("GSM_CONFIGS", str(configs(tmp_path)))
    without_pictures(monkeypatch)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(planned.paths, "script", lambda name: ["-S", str(tmp_path / "fake.py")])


def place(folder: Path, label: str) -> Path:
    """Return the folder of a run of the experiment."""
    return folder_of(folder / "logs/toy", label)


def ask(folder: Path, arm: str, word: str) -> Path:
    """Return the file that makes the runs of an arm fail or wait."""
    file = folder / f"logs/toy/{arm}.{word}"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def starts(folder: Path) -> dict[str, int]:
    found = sorted((folder / "logs/toy").glob("*/starts"))
    return {file.parent.name[:-9]: len(file.read_text()) for file in found}


def test_what_the_user_gives_comes_last_and_goes_to_every_run(tmp_path: Path):
    trials = composed(tmp_path, "model.state_size=11", "jobs=2", "seeds=1", "name=mine").trials()
    runs: Any = [trial.runs[""] for trial in trials]
    assert [run.config["model"]["state_size"] for run in runs] == [11, 11]
    assert [run.find_folder().parent for run in runs] == [tmp_path / "logs/mine"] * 2
    assert [run.label for run in runs] == ["mhc-seed0", "plain-seed0"]
    assert (
        runs[1].arguments
        == trials[1].overrides
        == (
            "experiment=toy",
            *(*(f"{key}=null" for key in SEVERAL), "arm=plain", "seed=0", "name=mine"),
            *("model/residual=plain", "model.state_size=9"),
            *(f"logs={tmp_path / 'logs'}", "model.state_size=11"),
        )
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["arm=plain"], ["plain-seed0", "plain-seed1"]),
        (["arm=[plain,mhc]", "seeds=[4]"], ["plain-seed4", "mhc-seed4"]),
        (["seeds=1"], ["mhc-seed0", "plain-seed0"]),
        (["seed=3"], ["mhc-seed3", "plain-seed3"]),
        (["arms=null", "model=baseline"], ["baseline-seed0", "baseline-seed1"]),
        (["seeds=null"], ["mhc-seed0", "plain-seed0"]),
    ],
    ids=" ".join,
)
def test_arms_and_seeds_can_be_picked(tmp_path: Path, given: list[str], names: list[str]):
    assert [trial.runs[""].label for trial in composed(tmp_path, *given).trials()] == names


@pytest.mark.parametrize(
    ("given", "words", "sentence"),
    [
        ({"arm": "plane"}, "arm=plane", "'plane'.*plain"),
        ({"seeds": 0}, "", "^seeds .*0"),
        ({"seeds": ["a"]}, "", r"^seeds .*\['a'\]"),
        ({"seed": 3, "seeds": 2}, "seed=3 seeds=2", "^seed .*seed=3 .*seeds=2"),
        ({"table": []}, "", "^table "),
        ({"arms": {"a b": []}}, "", "^arms: .*'a b'"),
        ({"arms": {"null": []}}, "", "^arms: .*'null'"),
        ({"arms": ["model/residual=plain"]}, "", r"^arms .*\['model/residual=plain'\]"),
        ({"arms": {"plain": "model/residual=plain"}}, "", r"^arms .*'plain': 'model/residual=plain'"),
        ({"arms": {"plain": [["seed=3"]]}}, "", r"^arms .*'plain': \[\["),
        ({"tune": [1]}, "", r"^tune .*\[1\]"),
        ({"runs": "train"}, "", "^runs .*'train'"),
        ({"arms": {"plain": ["seed=3"]}}, "", r"^arms\.plain .*seed=3"),
        ({"arms": {"plain": ["model.stages=[", "a"]}}, "", r"^arms\.plain .*model\.stages=\["),
        ({"arms": {}}, "", "^arms .*{}"),
        ({"labels": {"mhc": "plain"}}, "", r"^labels\.mhc .* plain "),
        ({"labels": ["a"]}, "", r"^labels .*\['a'\]"),
    ],
)
def test_what_cannot_be_an_experiment_is_refused(given: dict[str, Any], words: str, sentence: str):
    config = {"arms": {"mhc": [], "plain": []}, "arm": "mhc", "seed": 0, "seeds": [0], "table": None, "runs": None}
    with pytest.raises(ConfigError, match=sentence):
        Experiment({**config, **given}, words.split())


def test_a_misspelt_arm_fails_before_anything_trains_even_one_that_is_not_picked(tmp_path: Path):
    text = TOY.replace("model.state_size=9", "model.stat_size=9")
    with pytest.raises(ConfigError, match="^arm plain: .*model.stat_size"):
        train_all(composed(tmp_path, "arm=mhc", text=text))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_runs_are_trained_once_and_then_skipped(
    tmp_path: Path, fake: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, jobs: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    train_all(toy(tmp_path, f"jobs={jobs}"))
    printed = capfd.readouterr().out
    for number, name in enumerate(["mhc-seed0", "plain-seed0", "mhc-seed1", "plain-seed1"], 1):
        assert f"[{number}/4] {name}: finished after" in printed
    assert "left for 3 runs" in printed and "left for 1 run\n" in printed
    log = (place(tmp_path, "plain-seed1") / "train.log").read_text()
    assert f"threads {3 if jobs == 1 else 2}\n" in log, "several runs share the cores, one takes what it is given"
    assert f"logs={tmp_path / 'logs'}" in log.splitlines()[0], "the command is the first line"
    assert log.splitlines()[0].removeprefix("$ ") in printed, "and can be repeated by hand"
    assert ("threads" in printed) is (jobs == 1), "the output of one run at a time streams through"
    train_all(toy(tmp_path))
    assert "skipped: mhc-seed0, plain-seed0, mhc-seed1, plain-seed1" in (" ".join(capfd.readouterr().out.split()))
    assert set(starts(tmp_path).values()) == {1}


def test_a_failing_arm_stops_no_other_and_is_named(tmp_path: Path, fake: None, capfd: pytest.CaptureFixture[str]):
    ask(tmp_path, "mhc", "fails").touch()
    with pytest.raises(SystemExit) as stopped:
        train_all(toy(tmp_path))
    assert stopped.value.code == 1
    printed = capfd.readouterr().out
    assert "failed: mhc-seed0, mhc-seed1; to try again" in printed
    assert printed.rindex("it broke, as told") > printed.index("sample standard deviation"), "last words come last"
    assert [row["arm"] for row in read_csv(tmp_path)] == ["plain", "plain"]
    ask(tmp_path, "mhc", "fails").unlink()
    train_all(toy(tmp_path))
    assert starts(tmp_path) == {"mhc-seed0": 2, "mhc-seed1": 2, "plain-seed0": 1, "plain-seed1": 1}


def test_a_signal_reaches_the_runs_and_the_same_command_goes_on(
    tmp_path: Path, fake: None, capfd: pytest.CaptureFixture[str]
):
    number = signal.SIGTERM
    ask(tmp_path, "plain", "waits").touch()
    killer = threading.Thread(target=signal_when, args=(tmp_path / "logs/toy", os.getpid(), number))
    killer.start()
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        train_all(toy(tmp_path))
    killer.join()
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert (place(tmp_path, "plain-seed0") / "saved").read_text() == str(int(number))
    printed = capfd.readouterr().out
    assert "plain-seed0: interrupted by SIGTERM" in printed and "stopped; to go on:" in printed
    assert starts(tmp_path) == {"mhc-seed0": 1, "plain-seed0": 1}, "nothing was started after the signal"
    ask(tmp_path, "plain", "waits").unlink()
    train_all(toy(tmp_path))
    assert starts(tmp_path) == {"mhc-seed0": 1, "mhc-seed1": 1, "plain-seed0": 2, "plain-seed1": 1}


def test_a_run_without_its_checkpoint_is_trained_again(tmp_path: Path, fake: None):
    train_all(toy(tmp_path, "seeds=1"))
    (place(tmp_path, "mhc-seed0") / "checkpoints/step_00000001/state.json").unlink()
    train_all(toy(tmp_path, "seeds=1"))
    assert starts(tmp_path) == {"mhc-seed0": 2, "plain-seed0": 1}


def test_runs_that_do_not_compare_are_named_below_the_table(
    tmp_path: Path, fake: None, capfd: pytest.CaptureFixture[str]
):
    """One of another configuration is left out; of two texts, the means would be of both."""
    train_all(toy(tmp_path, "arm=plain", "seed=1", "model.state_size=12"))
    assert "mhc" not in (tmp_path / "logs/toy/results.md").read_text(), "an arm that was not chosen and has no run"
    experiment = toy(tmp_path, "seeds=1")
    train_all(experiment)
    assert "not in the table, because their configuration differs: plain-seed1" in capfd.readouterr().out
    assert [(row["arm"], row["seed"]) for row in read_csv(tmp_path)] == [("mhc", "0"), ("plain", "0")]
    for arm, corpus in (("mhc", "old"), ("plain", "new")):
        file = place(tmp_path, f"{arm}-seed0") / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "fingerprint": {"corpus": corpus}}))
    train_all(experiment)
    printed = " ".join(capfd.readouterr().out.split())
    assert "with care: plain (seed 0) differs from mhc (seed 0) in the data's corpus (old there, new here)" in printed


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_ranks_are_refused(name: str, tmp_path: Path, fake: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=f"{name}"):
        train_all(toy(tmp_path))


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "logs/toy/results.csv").open() as file:
        return list(csv.DictReader(file))


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def signal_when(experiment: Path, process: int, number: int) -> None:
    """Send a signal once a run of the experiment waits."""
    until(lambda: bool(list(experiment.glob("*/ready"))))
    os.kill(process, number)
