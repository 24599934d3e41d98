"""Disks that refuse, checkpoints that are broken or of something else, and where a run goes on from."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import arguments, at_call, count_calls, lines, no_death, started, typed

import gsm.training.callbacks.checkpoints as files
from gsm.config import command_line
from gsm.config.compose import compose
from gsm.config.load import CheckpointError, instantiate
from gsm.files import write_json
from gsm.training.folder import Start, prepare
from gsm.training.module import LanguageModeling
from gsm.training.resume import STATE


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_alone(home: Path, processes: Any):
    log, folder = home / "full.log", home / "logs/full/gsm/seed0"
    child = started(processes, arguments(home, "full"), log, partial(at_call, "training_step", 9, out_of_room))
    child.join()
    said = log.read_text()
    assert child.exitcode == 1, said
    sentence = said[said.index("error: ") :]
    assert sentence.startswith(f"error: {folder / 'checkpoints/last.ckpt'} cannot be written: File too large; free")
    assert "Traceback" not in said and sentence.count("\n") == 1
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
    assert not list(folder.rglob("*.partial")), "what was half written takes room"
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


def out_of_room() -> None:
    """From now on, no file may grow beyond 50 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


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
def test_a_folder_that_cannot_be_made_is_one_sentence(home: Path, processes: Any):
    (home / "taken").write_text("a file where the logs should go")
    given = [*arguments(home, "nowhere"), f"logs={home / 'taken'}"]
    done = typed(processes, home, "train.py", *given)
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
        CheckpointError,
        match=r"last.ckpt is truncated.*start_from=.*best.ckpt start_fresh=false name=NAME goes on from step \d+",
    ):
        prepared(home, copy)
    other = [f"folder={copy.with_name('other')}", f"start_from={best}", "start_fresh=false"]
    assert prepared(home, copy, *other).checkpoint == best
    best.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"last.ckpt is truncated.*; resume=never starts over$"):
        prepared(home, copy)
    assert last.is_file(), "nothing was moved"


def test_a_run_whose_last_checkpoint_is_gone_does_not_start_over(home: Path, copy: Path):
    """It was moved aside without a word, and trained again from the first step."""
    last, best = copy / "checkpoints/last.ckpt", copy / "checkpoints/best.ckpt"
    last.unlink()
    for status in ("interrupted", "finished"):
        (copy / "summary.json").write_text(json.dumps({"status": status}))
        with pytest.raises(CheckpointError, match=r"last.ckpt.*start_from=\S*best.ckpt start_fresh=false"):
            prepared(home, copy)
    best.unlink()
    assert prepared(home, copy).moves


def test_auto_is_no_other_precision_on_another_device(home: Path, copy: Path, processes: Any):
    """A run that began on a GPU in bfloat16 went on in float32 on a CPU."""
    path, log = copy / "checkpoints/last.ckpt", copy.with_name("precision.log")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint[STATE]["precision"] == "32-true"
    checkpoint[STATE]["precision"] = "bf16-mixed"
    torch.save(checkpoint, path)
    (copy / "summary.json").write_text(json.dumps({"status": "interrupted"}))
    child = started(processes, arguments(home, "copy", f"folder={copy}"), log, no_death)
    child.join()
    assert child.exitcode == 1 and "error: trainer.precision" in log.read_text(), log.read_text()


@pytest.mark.slow
def test_a_step_that_is_divided_otherwise_takes_the_same_sequences(home: Path, processes: Any):
    """Counted in batches of another number, a resumed run would have stood at another place in the data."""
    seen, log = home / "seen.pt", home / "divided.log"
    for more, ends in (((), True), (("data.batch_size=8",), False)):
        given = arguments(home, "divided", "trainer.max_steps=9", *more)
        child = started(processes, given, log, partial(remembers_and_stops, seen, 11 if ends else 0))
        child.join()
        assert child.exitcode == (128 + signal.SIGTERM if ends else 0), log.read_text()
    rows = torch.cat(torch.load(seen, weights_only=True))
    data = instantiate(compose(arguments(home, "divided"))["data"], "data")
    assert torch.equal(rows, torch.stack([row["tokens"] for row in data.consumed(9 * 8)]))


def remembers_and_stops(seen: Path, count: int) -> None:
    """Keeps what finished steps were trained on; at the batch of this number a signal comes."""
    trained, batches = count_calls(count), torch.load(seen, weights_only=True) if seen.exists() else []

    def step(self: Any, batch: Any, *given: Any, whole: Callable[..., Any] = LanguageModeling.training_step) -> Any:
        batches.append(batch["tokens"])
        per_step = self.trainer.accumulate_grad_batches
        torch.save(batches[: len(batches) // per_step * per_step], seen)
        if trained():
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, batch, *given)

    setattr(LanguageModeling, "training_step", step)  # noqa: B010 - the signature is another


@pytest.mark.slow
def test_a_finished_run_can_be_prolonged_from_its_checkpoint(home: Path, straight: Path, processes: Any):
    log = home / "longer.log"
    given = arguments(home, "longer", "trainer.max_steps=33", f"start_from={straight}", "start_fresh=false")
    child = started(processes, given, log, no_death)
    child.join()
    assert child.exitcode == 0, log.read_text()
    folder = home / "logs/longer/gsm/seed0"
    assert {int(line.split(",")[0]) for line in lines(folder)[1:]} == {33}
    assert json.loads((folder / "summary.json").read_text())["steps"] == 33
