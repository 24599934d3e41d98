"""Runs that are killed or stopped: what is left of them, and that they end as if nothing was.

``GSM_TEST_KILLS=100 pytest tests/test_survival.py -k killed`` kills a run that often; ``GSM_TEST_SEED`` chooses when.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from short_runs import arguments, at_call, count_calls, logged, no_death, place_of, scalars, sent, started
from stored import same

from gsm import checkpoint, files
from gsm.training import report, run
from gsm.training.callbacks.interruption import SAME
from gsm.training.module import LanguageModeling
from gsm.training.resume import STATE

KILLS = int(os.environ.get("GSM_TEST_KILLS", "7"))


# What a child process does to itself. Each is called with a count: at which occurrence.


def killed_in_a_half_written_checkpoint(count: int) -> None:
    """In the weights, or in the other tensors."""
    written = count_calls(count)

    def write(path: Path, tensors: Any, whole: Callable[..., list[int]] = checkpoint.write_tensors) -> list[int]:
        if written():
            path.write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(path, tensors)

    checkpoint.write_tensors = write


def killed_as_earlier_steps_are_removed(count: int) -> None:
    removed = count_calls(max(1, count // 2))

    def remove(folder: Path, whole: Callable[..., None] = checkpoint.remove) -> None:
        if removed():
            (folder / checkpoint.STATE).unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        whole(folder)

    checkpoint.remove = remove


def killed_as_the_checkpoint_gets_its_name(before: bool, count: int) -> None:
    named = count_calls(count)

    def replace(old: Path, new: Path, whole: Callable[..., None] = os.replace) -> None:
        if not before:
            whole(old, new)
        if Path(new).name == checkpoint.STATE and named():
            os.kill(os.getpid(), signal.SIGKILL)
        if before:
            whole(old, new)

    files.os.replace = replace


def killed_in_a_validation(count: int) -> None:
    sent(signal.SIGKILL, "validation_step", count % 2 + 1)


def killed_in_the_last_validation(count: int) -> None:
    """Nothing of it is written yet."""

    def step(self: Any, *given: Any, whole: Callable[..., None] = LanguageModeling.validation_step) -> None:
        if self.trainer.global_step == self.trainer.max_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *given)

    setattr(LanguageModeling, "validation_step", step)  # noqa: B010


def killed_once_it_is_finished() -> None:
    """After the last word of the summary, before the process ends."""
    report.conclusion = lambda *given: os.kill(os.getpid(), signal.SIGKILL)


def killed_at_some_moment(count: int) -> None:
    """By the parent."""


DEATHS = [
    killed_at_some_moment,
    killed_in_a_half_written_checkpoint,
    killed_in_a_validation,
    partial(killed_as_the_checkpoint_gets_its_name, True),
    partial(sent, signal.SIGKILL, "training_step"),
    partial(killed_as_the_checkpoint_gets_its_name, False),
    killed_as_earlier_steps_are_removed,
]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(home: Path, processes: Any, straight: Path):
    """Once it is finished, it is left as it is: it was moved aside, and trained again from the first step."""
    chance, log = random.Random(int(os.environ.get("GSM_TEST_SEED", "0"))), home / "killed.log"
    folder, deaths = place_of(home, "killed"), [DEATHS[kill % len(DEATHS)] for kill in range(KILLS)]
    finished, code = False, 0
    for death in [*deaths, killed_in_the_last_validation]:
        injected = partial(death, chance.randint(2, 12))
        child = started(processes, arguments(home, "killed"), log, injected)
        if death is killed_at_some_moment:
            wait_for_progress(folder, child)
            time.sleep(chance.uniform(0, 0.4))
            child.kill()
        child.join()
        if child.exitcode == 0:
            (folder / "summary.json").write_text('{"status": "running"}')  # too late: let it conclude once more
        assert child.exitcode in (0, -signal.SIGKILL), log.read_text()
        finished, code = finished or child.exitcode == 0, child.exitcode
    assert finished or code == -signal.SIGKILL, "the last validation is run, and kills"
    child = started(processes, arguments(home, "killed"), log, killed_once_it_is_finished)
    child.join()
    assert child.exitcode == -signal.SIGKILL, log.read_text()
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    child = started(processes, arguments(home, "killed"), log, no_death)
    child.join()
    assert child.exitcode == 0 and "is finished already" in log.read_text()
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    assert not list(folder.rglob("*.partial")), "what was half written has to be swept away"
    assert_same_run(folder, straight)


def killed_in_the_conclusion() -> None:
    run._conclude = lambda parts: os.kill(os.getpid(), signal.SIGKILL)


STOPPED = [f"+callbacks.stop.{word}" for word in ("monitor=val/loss", "patience=1", "min_delta=5")]
STOPPED += ["+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"]


def test_a_run_that_a_callback_ends_is_finished(home: Path, processes: Any):
    """The same command trained on, to other weights at each repetition, and no table had the run."""
    log, folders = home / "stopped.log", []
    for name, deaths in {
        "stopped": [no_death, no_death],
        "killed-stopped": [killed_in_the_conclusion, no_death],
    }.items():
        folders.append(place_of(home, name, *STOPPED))
        for death in deaths:
            child = started(processes, arguments(home, name, *STOPPED), log, death)
            child.join()
            assert child.exitcode == (0 if death is no_death else -signal.SIGKILL), log.read_text()
        summary = json.loads((folders[-1] / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("finished", 14) and "at step 14 of 30" in summary["reason"]
    assert log.read_text().count("is finished already") == 1
    assert_same_run(*folders)
    branch = [*STOPPED, f"start_from={folders[0]}", "start_fresh=false"]
    child = started(processes, arguments(home, "stopped-branch", *branch), log, no_death)
    child.join()
    folder = place_of(home, "stopped-branch", *branch)
    assert json.loads((folder / "summary.json").read_text())["steps"] > 14, log.read_text()


@pytest.mark.slow
def test_signals_end_a_run_where_nothing_is_pending_and_the_same_call_goes_on(
    home: Path, processes: Any, straight: Path
):
    """In the middle of an accumulated step, and in a validation inside of a step: at the end of the logging interval,
    which has three steps of two batches. So nothing that was trained is lost."""
    log, folder = home / "signals.log", place_of(home, "signals")
    signals = [
        (signal.SIGTERM, 143, ("training_step", 7), 6),
        (signal.SIGINT, 130, ("validation_step", 1), 9),
        (signal.SIGUSR1, 138, ("training_step", 4), 12),
        (signal.SIGUSR2, 140, ("training_step", 6), 15),  # with a validation to follow
        (signal.SIGHUP, 129, ("training_step", 4), 18),  # of a terminal that was closed
    ]
    for number, code, (method, count), step in signals:
        given = arguments(home, "signals", "callbacks.latest.minutes=10")
        child = started(processes, given, log, partial(signalled, number, method, count))
        child.join()
        said = log.read_text()
        assert child.exitcode == code, f"{number!r}: {said}"
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
        assert f"{number.name}: training goes on to the end of its logging interval, a multiple of 3 steps" in said, (
            said
        )
        assert f"interrupted at step {step} of 30, and saved; to go on:" in said, said
        assert "Traceback" not in said
    child = started(processes, arguments(home, "signals"), log, no_death)
    child.join()
    assert child.exitcode == 0, log.read_text()
    assert_same_run(folder, straight)


def signalled(number: signal.Signals, method: str, count: int) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
    sent(number, method, count)


def signalled_twice() -> None:
    """The second signal comes while the first is still being waited for."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2 * SAME)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(home: Path, processes: Any):
    injected = partial(at_call, "training_step", 3, signalled_twice)
    child = started(processes, arguments(home, "twice", "callbacks=default"), home / "twice.log", injected)
    child.join(50)
    said = (home / "twice.log").read_text()
    assert child.exitcode == 128 + signal.SIGTERM, said
    assert "interrupted at step 1 of 30; nothing was saved; once more:" in said and "Traceback" not in said
    folder = place_of(home, "twice", "callbacks=default")
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"


def wait_for_progress(folder: Path, child: Any) -> None:
    """Until the run has written something that it had not when it started."""
    metrics = folder / "metrics.jsonl"
    before, patience = metrics.stat().st_mtime if metrics.is_file() else 0, time.monotonic() + 60
    while child.is_alive() and time.monotonic() < patience:
        if metrics.is_file() and metrics.stat().st_mtime > before + 1e-3:
            return
        time.sleep(0.01)


def assert_same_run(folder: Path, other: Path) -> None:
    """Bit for bit: weights, optimiser, what was logged at which step, and the verdict on the best."""
    steps = [path.name for path in checkpoint.steps(folder)]
    assert steps == [path.name for path in checkpoint.steps(other)]
    for step in steps:
        one, two = (checkpoint.read(f / "checkpoints" / step) for f in (folder, other))
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", STATE):
            assert same(one[part], two[part]), f"{step} {part}"
        key = "Best(val/loss, min)"
        assert one["callbacks"][key] == two["callbacks"][key]
    assert logged(folder) == logged(other)
    assert scalars(folder) == scalars(other)
    one, two = (json.loads((f / "summary.json").read_text()) for f in (folder, other))
    for key in ("status", "steps", "tokens", "val_loss", "bits_per_byte"):
        assert one[key] == two[key], key
