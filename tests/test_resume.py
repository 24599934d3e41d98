"""Disks that refuse, checkpoints that are broken or of something else, and where a run goes on from."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import arguments, count_calls, lines, no_death, started

import gsm.training.callbacks.checkpoints as files
from gsm.config import command_line
from gsm.config.compose import compose
from gsm.config.load import CheckpointError, instantiate
from gsm.experiments.folder import Start, prepare
from gsm.files import write_json
from gsm.paths import ROOT
from gsm.training.callbacks.metrics_file import MetricsFile
from gsm.training.module import LanguageModeling


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_alone(home: Path, processes: Any):
    log, folder = home / "full.log", home / "logs/full/gsm/seed0"
    child = started(processes, arguments(home, "full"), log, partial(out_of_room, 9))
    child.join()
    said = log.read_text()
    assert child.exitcode == 1, said
    sentence = said[said.index("error: ") :]
    assert sentence.startswith(f"error: {folder / 'checkpoints/last.ckpt'} cannot be written: File too large; free")
    assert "Traceback" not in said and sentence.count("\n") == 1
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
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
        "global_batch=4": r"sequences a step \(8 there, 4 here\), global_batch \(8 there, 4 here\)",
        "model.state_size=6": r"model.state_size \(.* there, 6 here\)",
        "optimizer.learning_rate=0.5": r"optimizer.learning_rate \(.* there, 0.5 here\)",
        "seed=3": r"data.seed \(0 there, 3 here\), seed \(0 there, 3 here\)",
    }.items():
        with pytest.raises(CheckpointError, match=f"cannot go on with this configuration: it differs in {said}"):
            prepared(home, copy, last, change)
    free = prepared(home, copy, last, "name=other", "trainer.max_steps=40", "trainer.log_every_n_steps=5")
    assert free.sentence.endswith("jumps to the curve of the new length: the learning rate.")
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

    LanguageModeling.training_step = step


@pytest.mark.slow
def test_a_finished_run_can_be_prolonged_from_its_checkpoint(home: Path, straight: Path, processes: Any):
    log = home / "longer.log"
    given = arguments(home, "longer", "trainer.max_steps=33", f"resume={straight / 'checkpoints/last.ckpt'}")
    child = started(processes, given, log, no_death)
    child.join()
    assert child.exitcode == 0, log.read_text()
    folder = home / "logs/longer/gsm/seed0"
    assert {int(line.split(",")[0]) for line in lines(folder)[1:]} == {33}
    assert json.loads((folder / "summary.json").read_text())["steps"] == 33


def test_lines_after_the_checkpoint_are_dropped_and_a_torn_one_too(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.csv")
    for step in (1, 2, 3):
        file.log_metrics({"train/loss": 1.0 / step}, step)
    with file.path.open("a") as more:
        more.write("1,val/lo")
    file.rewind(2)
    assert file.path.read_text() == "step,name,value\n1,train/loss,1\n2,train/loss,0.5\n"
