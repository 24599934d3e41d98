"""Runs that are killed, stopped, broken or out of disk: what is left of them, and that they end as if nothing was.

``GSM_TEST_KILLS=100 pytest tests/test_survival.py -k killed`` kills a run that often; ``GSM_TEST_SEED`` chooses when.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gsm.callbacks.files as files
from gsm.callbacks.interruption import SAME
from gsm.callbacks.metrics_file import MetricsFile
from gsm.callbacks.summary import write_json
from gsm.paths import ROOT
from gsm.runs import command_line
from gsm.runs.compose import compose
from gsm.runs.fit import train
from gsm.runs.folder import Start, prepare
from gsm.runs.load import CheckpointError
from gsm.task import LanguageModeling

TINY = (
    "model/residual=plain size.vocabulary=257 size.context=32 "
    "size.dim=16 size.feed_forward_dim=32 size.heads=2 size.entry_dim=8 "
    "size.rotary_dim=4 size.query_rank=8 size.output_rank=8 size.index_dim=8 size.window=4 size.top_k=4 "
    "data=folder data.tokenizer=bytes data.batch_size=4 data.validation_sequences=10 trainer=cpu trainer.max_steps=30 "
    "trainer.accumulate_grad_batches=2 trainer.val_check_interval=15 trainer.log_every_n_steps=3 "
    "callbacks.latest.minutes=1e-9 ngrams=false sample=false"
).split()
UNSTEADY = {"train/tokens_per_second", "train/peak_memory_gib"}
KILLS = int(os.environ.get("GSM_TEST_KILLS", "5"))


# What a child process does to itself. Each is called with a count: at which occurrence.


def killed_in_a_half_written_checkpoint(count: int) -> None:
    written = count_calls(count)

    def write(content: Any, path: Path, whole: Callable[..., None] = files.save_whole) -> None:
        if written():
            path.with_name(files.PARTIAL.format(path.name)).write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        whole(content, path)

    files.save_whole = write


def killed_before_the_checkpoint_has_its_name(count: int) -> None:
    named = count_calls(count)

    def replace(old: Path, new: Path, whole: Callable[..., None] = os.replace) -> None:
        if str(new).endswith(".ckpt") and named():
            os.kill(os.getpid(), signal.SIGKILL)
        whole(old, new)

    files.os.replace = replace


def killed_after_the_checkpoint_has_its_name(count: int) -> None:
    named = count_calls(count)

    def replace(old: Path, new: Path, whole: Callable[..., None] = os.replace) -> None:
        whole(old, new)
        if str(new).endswith(".ckpt") and named():
            os.kill(os.getpid(), signal.SIGKILL)

    files.os.replace = replace


def killed_in_a_validation(count: int) -> None:
    validated = count_calls(count % 2 + 1)

    def step(self: Any, *given: Any, whole: Callable[..., None] = LanguageModeling.validation_step) -> None:
        if validated():
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *given)

    LanguageModeling.validation_step = step


def killed_in_a_batch(count: int) -> None:
    trained = count_calls(count)

    def step(self: Any, *given: Any, whole: Callable[..., Any] = LanguageModeling.training_step) -> Any:
        if trained():
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *given)

    LanguageModeling.training_step = step


def killed_at_some_moment(count: int) -> None:
    """By the parent."""


DEATHS = [
    killed_at_some_moment,
    killed_in_a_half_written_checkpoint,
    killed_in_a_validation,
    killed_before_the_checkpoint_has_its_name,
    killed_in_a_batch,
    killed_after_the_checkpoint_has_its_name,
]


def count_calls(until: int) -> Callable[[], bool]:
    """A function that is true the `until`-th time it is called."""
    left = [until]

    def called() -> bool:
        left[0] -= 1
        return left[0] == 0

    return called


def run_here(arguments: list[str], log: Path, death: Callable[[], None]) -> None:
    """In a child process: one run, with what it prints in a file."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = log.open("a", encoding="utf-8")
    death()
    with command_line.errors_as_sentences():
        train(compose(arguments))


@pytest.fixture(scope="module")
def processes() -> Any:
    """Fresh processes that have their imports done already: to start one takes a tenth of a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gsm.runs.fit", "tensorboard.summary.writer.event_file_writer"])
    return context


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text that a run goes through more than once."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "text").mkdir()
    for path in tiny_text.write(folder / "text").iterdir():
        path.write_text(path.read_text()[:150])
    return folder


def arguments(home: Path, name: str, *more: str) -> list[str]:
    places = [f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}", f"logs={home / 'logs'}"]
    return [*TINY, *places, f"name={name}", *more]


@pytest.fixture(scope="module")
def straight(home: Path, processes: Any) -> Path:
    """The folder of a run that nothing happened to."""
    child = processes.Process(target=run_here, args=(arguments(home, "straight"), home / "straight.log", no_death))
    child.start()
    child.join()
    assert child.exitcode == 0, (home / "straight.log").read_text()
    return home / "logs/straight/gsm/seed0"


def no_death() -> None:
    pass


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(home: Path, processes: Any, straight: Path):
    chance, log = random.Random(int(os.environ.get("GSM_TEST_SEED", "0"))), home / "killed.log"
    folder, kills = home / "logs/killed/gsm/seed0", 0
    while kills < KILLS:
        death = DEATHS[kills % len(DEATHS)]
        injected = partial(death, chance.randint(2, 12))
        child = processes.Process(target=run_here, args=(arguments(home, "killed"), log, injected))
        child.start()
        if death is killed_at_some_moment:
            wait_for_progress(folder, child)
            time.sleep(chance.uniform(0, 0.4))
            child.kill()
        child.join()
        if child.exitcode == 0:
            (folder / "summary.json").write_text('{"status": "running"}')  # too late: let it conclude once more
        assert child.exitcode in (0, -signal.SIGKILL), log.read_text()
        kills += 1
    child = processes.Process(target=run_here, args=(arguments(home, "killed"), log, no_death))
    child.start()
    child.join()
    assert child.exitcode == 0, log.read_text()
    assert not list(folder.rglob("*.partial")), "what was half written has to be swept away"
    assert_same_run(folder, straight)


@pytest.mark.slow
def test_signals_end_a_run_at_the_next_batch_and_the_same_call_goes_on(home: Path, processes: Any, straight: Path):
    """In the middle of an accumulated step, at a step's end, and in a validation, which must not be waited for."""
    log, folder = home / "signals.log", home / "logs/signals/gsm/seed0"
    signals = [
        (signal.SIGTERM, 143, partial(signalled_in_a_batch, 7, signal.SIGTERM), "interrupted at step 3 of 30"),
        (signal.SIGINT, 130, partial(signalled_in_a_validation, signal.SIGINT), "interrupted at step 7 of 30"),
        (signal.SIGUSR1, 138, partial(signalled_in_a_batch, 4, signal.SIGUSR1), "interrupted at step 9 of 30"),
    ]
    for number, code, injected, said in signals:
        given = arguments(home, "signals", "callbacks.latest.minutes=10")
        child = processes.Process(target=run_here, args=(given, log, injected))
        child.start()
        child.join()
        assert child.exitcode == code, f"{number!r}: {log.read_text()}"
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
        assert f"{said}, and saved; to go on:" in log.read_text()
        assert "Traceback" not in log.read_text()
    child = processes.Process(target=run_here, args=(arguments(home, "signals"), log, no_death))
    child.start()
    child.join()
    assert child.exitcode == 0, log.read_text()
    assert_same_run(folder, straight)


def signalled_in_a_batch(count: int, number: signal.Signals, again_after: float | None = None) -> None:
    trained = count_calls(count)

    def step(self: Any, *given: Any, whole: Callable[..., Any] = LanguageModeling.training_step) -> Any:
        if trained():
            os.kill(os.getpid(), number)
            if again_after is not None:
                time.sleep(again_after)
                os.kill(os.getpid(), number)
                time.sleep(60)
        return whole(self, *given)

    LanguageModeling.training_step = step


def signalled_in_a_validation(number: signal.Signals) -> None:
    calls = [0]

    def step(self: Any, *given: Any, whole: Callable[..., None] = LanguageModeling.validation_step) -> None:
        calls[0] += 1
        assert calls[0] == 1, "a validation went on after the signal"
        os.kill(os.getpid(), number)
        whole(self, *given)

    LanguageModeling.validation_step = step


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(home: Path, processes: Any):
    injected = partial(signalled_in_a_batch, 3, signal.SIGTERM, 2 * SAME)
    child = processes.Process(
        target=run_here, args=(arguments(home, "twice", "callbacks=default"), home / "twice.log", injected)
    )
    child.start()
    child.join(50)
    assert child.exitcode == -signal.SIGTERM, "it went on sleeping"


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_alone(home: Path, processes: Any):
    log, folder = home / "full.log", home / "logs/full/gsm/seed0"
    child = processes.Process(target=run_here, args=(arguments(home, "full"), log, partial(out_of_room, 9)))
    child.start()
    child.join()
    said = log.read_text()
    assert child.exitcode == 1, said
    sentence = said[said.index("error: ") :]
    assert sentence.startswith(f"error: {folder / 'checkpoints/last.ckpt'} cannot be written: File too large; free")
    assert "Traceback" not in said and sentence.count("\n") == 1
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    assert not list(folder.rglob("*.partial")), "what was half written takes room"
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


def out_of_room(count: int) -> None:
    """From some batch on, no file may grow beyond 50 kB."""
    trained = count_calls(count)

    def step(self: Any, *given: Any, whole: Callable[..., Any] = LanguageModeling.training_step) -> Any:
        if trained():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        return whole(self, *given)

    LanguageModeling.training_step = step


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_file_that_cannot_be_written_is_named_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    path = tmp_path / "summary.json"
    write_json(path, {"status": "finished"})

    def refuses(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "fsync", refuses)
    with pytest.raises(SystemExit, match=f"^error: {path} cannot be written: {os.strerror(code)}; "):
        with command_line.errors_as_sentences():
            write_json(path, {"status": "failed"})
    assert json.loads(path.read_text()) == {"status": "finished"}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_is_one_sentence(home: Path):
    (home / "taken").write_text("a file where the logs should go")
    given = [*arguments(home, "nowhere"), f"logs={home / 'taken'}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *given], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert str(home / "taken") in done.stderr and "logs=" in done.stderr


def prepared(home: Path, folder: Path, *more: str) -> Start:
    """What a run in a copy of a folder would start with."""
    config = compose(arguments(home, "copy", f"folder={folder}", *more))
    return prepare(config)


@pytest.fixture
def copy(straight: Path, tmp_path: Path) -> Path:
    """A folder as a run leaves it that was killed after its last step."""
    folder = tmp_path / "copy"
    shutil.copytree(straight, folder)
    (folder / "summary.json").unlink()
    for path in folder.rglob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["hyper_parameters"]["config"]["name"] = "copy"
        torch.save(checkpoint, path)
    return folder


@pytest.mark.slow
def test_a_broken_checkpoint_is_never_passed_over(home: Path, copy: Path):
    last, best = copy / "checkpoints/last.ckpt", copy / "checkpoints/best.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(
        CheckpointError, match=r"last.ckpt is truncated.*resume=.*best.ckpt goes on from step \d+, resume"
    ):
        prepared(home, copy)
    assert prepared(home, copy, f"resume={best}").checkpoint == best.resolve()
    best.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"last.ckpt is truncated.*; resume=never starts over$"):
        prepared(home, copy)
    assert last.is_file(), "nothing was moved"


@pytest.mark.slow
def test_a_checkpoint_of_another_configuration_is_refused_with_what_differs(home: Path, copy: Path):
    last = f"resume={copy / 'checkpoints/last.ckpt'}"
    for change, said in {
        "data.batch_size=2": r"data.batch_size \(4 there, 2 here\)",
        "model.state_size=6": r"model.state_size \(.* there, 6 here\)",
        "optimizer.learning_rate=0.5": r"optimizer.learning_rate \(.* there, 0.5 here\)",
        "seed=3": r"data.seed \(0 there, 3 here\), seed \(0 there, 3 here\)",
    }.items():
        with pytest.raises(CheckpointError, match=f"cannot go on with this configuration: it differs in {said}"):
            prepared(home, copy, last, change)
    free = prepared(home, copy, last, "name=other", "trainer.max_steps=40", "trainer.log_every_n_steps=5")
    assert free.sentence.endswith("the learning rate follows the curve of the new length, so it jumps.")
    assert free.step == 30


@pytest.mark.slow
def test_starting_over_says_why(home: Path, copy: Path):
    (copy / "summary.json").write_text('{"status": "finished"}')
    longer = prepared(home, copy, "trainer.max_steps=40")
    assert longer.checkpoint is None
    assert "it is finished, after 30 steps, and one of another length is another run" in longer.sentence
    assert not (copy / "checkpoints").exists()
    moved = Path(re.search(r"moved to (\S+):", longer.sentence)[1])
    assert (moved / "checkpoints/last.ckpt").is_file()


@pytest.mark.slow
def test_a_finished_run_can_be_prolonged_from_its_checkpoint(home: Path, straight: Path, processes: Any):
    log = home / "longer.log"
    given = arguments(home, "longer", "trainer.max_steps=33", f"resume={straight / 'checkpoints/last.ckpt'}")
    child = processes.Process(target=run_here, args=(given, log, no_death))
    child.start()
    child.join()
    assert child.exitcode == 0, log.read_text()
    folder = home / "logs/longer/gsm/seed0"
    assert {int(line.split(",")[0]) for line in lines(folder)[1:]} == {30, 33}
    assert json.loads((folder / "summary.json").read_text())["steps"] == 33


def test_lines_after_the_checkpoint_are_dropped_and_a_torn_one_too(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.csv")
    for step in (1, 2, 3):
        file.log_metrics({"train/loss": 1.0 / step}, step)
    with file.path.open("a") as more:
        more.write("1,val/lo")
    file.rewind(3)
    assert file.path.read_text() == "step,name,value\n1,train/loss,1\n2,train/loss,0.5\n"


def wait_for_progress(folder: Path, child: Any) -> None:
    """Until the run has written something that it had not when it started."""
    metrics = folder / "metrics.csv"
    before, patience = metrics.stat().st_mtime if metrics.is_file() else 0, time.monotonic() + 60
    while child.is_alive() and time.monotonic() < patience:
        if metrics.is_file() and metrics.stat().st_mtime > before + 1e-3:
            return
        time.sleep(0.01)


def assert_same_run(folder: Path, other: Path) -> None:
    """Bit for bit: weights, optimiser, what was logged at which step, and the verdict on the best."""
    for name in ("last", "best"):
        one, two = (torch.load(f / f"checkpoints/{name}.ckpt", weights_only=True) for f in (folder, other))
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            assert_equal(one[part], two[part], f"{name}.ckpt {part}")
        assert_equal(one["standing"]["random"], two["standing"]["random"], f"{name}.ckpt random states")
        assert one["callbacks"]["Best"] == two["callbacks"]["Best"]
    assert lines(folder) == lines(other)
    assert scalars(folder) == scalars(other)
    one, two = (json.loads((f / "summary.json").read_text()) for f in (folder, other))
    for key in ("status", "steps", "tokens", "val_loss", "bits_per_byte"):
        assert one[key] == two[key], key


def assert_equal(one: Any, two: Any, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two), where
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_equal(one[key], two[key], f"{where} {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for first, second in zip(one, two, strict=True):
            assert_equal(first, second, where)
    else:
        assert one == two, where


def lines(folder: Path) -> list[str]:
    text = (folder / "metrics.csv").read_text().splitlines()
    return [line for line in text if line.split(",")[1] not in UNSTEADY]


def scalars(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """What TensorBoard shows; text, since a metric that is not measured yet is NaN."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = sorted(set(events.Tags()["scalars"]) - UNSTEADY)
    return {tag: [(point.step, str(point.value)) for point in events.Scalars(tag)] for tag in tags}
