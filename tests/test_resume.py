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
from short_runs import arguments, at_call, count_calls, logged, no_death, place_of, started, typed

from gsm import checkpoint, files
from gsm.config import command_line
from gsm.config.compose import compose
from gsm.config.load import CheckpointError, instantiate
from gsm.config.stored import read_checkpoint
from gsm.files import write_json
from gsm.training.folder import Begin, begin
from gsm.training.module import LanguageModeling
from gsm.training.resume import STATE
from gsm.training.run import open_data


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_alone(home: Path, processes: Any):
    log, folder = home / "full.log", place_of(home, "full")
    child = started(processes, arguments(home, "full"), log, partial(at_call, "training_step", 9, out_of_room))
    child.join()
    said = log.read_text()
    assert child.exitcode == 1, said
    sentence = said[said.index("error: ") :]
    full = folder / "checkpoints/step_00000006/model.safetensors"
    assert sentence.startswith(f"error: {full}: File too large")
    assert "Traceback" not in said and sentence.count("\n") == 1
    assert read_checkpoint(folder)["global_step"] == 3
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
    with pytest.raises(SystemExit, match=f"^error: {path}: {os.strerror(code)}$"):
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
    assert str(home / "taken") in done.stderr


def begun(home: Path, folder: Path) -> Begin:
    """Where a run begins in a copy of a folder."""
    config = compose(copied(home, folder))
    return begin(config, open_data(config).fingerprint())


def copied(home: Path, folder: Path) -> list[str]:
    """The arguments of the run in a copy of a folder."""
    return arguments(home, folder.parent.name, f"logs={folder.parent.parent}")


@pytest.fixture
def copy(straight: Path, tmp_path: Path) -> Path:
    """A folder as a run leaves it that was killed after its last step."""
    folder = tmp_path / "copy" / straight.name
    shutil.copytree(straight, folder)
    (folder / "summary.json").unlink()
    for step in checkpoint.steps(folder):
        content = json.loads((step / checkpoint.CONFIG).read_text())
        content["run"]["config"]["name"] = "copy"
        edit(step, checkpoint.CONFIG, content)
    return folder


def edit(step: Path, name: str, content: dict[str, Any]) -> None:
    """Write another content of a file of a step, and its checksum."""
    write_json(step / name, content)
    state = json.loads((step / checkpoint.STATE).read_text())
    if name != checkpoint.STATE:
        state["files"][name] = checkpoint.checksum(step / name)
        write_json(step / checkpoint.STATE, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.OTHERS, checkpoint.CONFIG, checkpoint.STATE])
def test_a_broken_checkpoint_is_never_passed_over(home: Path, copy: Path, name: str):
    last = checkpoint.newest(copy)
    assert last is not None
    for raw in ((last / name).read_bytes()[:200], b""):
        (last / name).write_bytes(raw)
        with pytest.raises(CheckpointError, match=rf"{name}.*{copy.name}"):
            begun(home, copy)
    (last / name).unlink()
    if name != checkpoint.STATE:  # without it there is no such step
        with pytest.raises(CheckpointError, match=name):
            begun(home, copy)
    assert last.is_dir(), "nothing was moved"


def test_a_bit_that_fell_over_is_found(home: Path, copy: Path):
    last = checkpoint.newest(copy)
    assert last is not None
    for name in (checkpoint.WEIGHTS, checkpoint.OTHERS):
        raw = bytearray((last / name).read_bytes())
        raw[-1] ^= 1
        (last / name).write_bytes(raw)
        with pytest.raises(CheckpointError, match=name):
            begun(home, copy)
        raw[-1] ^= 1
        (last / name).write_bytes(raw)
    assert begun(home, copy).checkpoint == last


def test_auto_is_no_other_precision_on_another_device(home: Path, copy: Path, processes: Any):
    """A run that began on a GPU in bfloat16 went on in float32 on a CPU."""
    last, log = checkpoint.newest(copy), copy.with_name("precision.log")
    assert last is not None
    state = json.loads((last / checkpoint.STATE).read_text())
    assert state[STATE]["precision"] == "32-true"
    state[STATE]["precision"] = "bf16-mixed"
    edit(last, checkpoint.STATE, state)
    (copy / "summary.json").write_text(json.dumps({"status": "interrupted"}))
    child = started(processes, copied(home, copy), log, no_death)
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
    folder = place_of(home, "longer", "trainer.max_steps=33", f"start_from={straight}", "start_fresh=false")
    assert {step for values in logged(folder).values() for step in values} == {33}
    assert json.loads((folder / "summary.json").read_text())["steps"] == 33
