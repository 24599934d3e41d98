"""Where a run starts, decided from what lies in its folder; the checkpoints here hold no weights."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import re
import signal
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_text
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from short_runs import TINY
from stored import store

from gsm.checkpoint import newest
from gsm.config import command_line
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import CheckpointError
from gsm.evaluation.generate import generate
from gsm.training import folder as run_folder
from gsm.training import run as fit
from gsm.training.callbacks.checkpoints import Latest
from gsm.training.callbacks.interruption import Interrupted
from gsm.training.callbacks.metrics_file import MetricsFile
from gsm.training.folder import Start, differences, finished, make_room, prepare
from gsm.training.resume import STATE
from gsm.training.weights import begins

TEXT = {"corpus": "a" * 64, "tokenizer": "b" * 64, "context": 32}
SELECTION = {"_target_": "gsm.training.callbacks.selection.DenseFirst", "until": 0.5, "shrink": 0.25}


@lru_cache
def composed() -> dict[str, Any]:
    return compose([*TINY, "data.path=/texts", "logs=/logs"])


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of a run in this folder; `data__seed=1` changes a key below another."""
    made: dict[str, Any] = copy.deepcopy(composed()) | {"folder": str(folder), "logs": str(folder.parent / "logs")}
    for name, value in changes.items():
        node, *rest = name.split("__")
        if rest:
            made[node][rest[0]] = value
        else:
            made[node] = value
    return made


def leave(folder: Path, status: str = "interrupted", **saved: Any) -> Path:
    """Write the folder of a run that ended at step 7, and return its checkpoint."""
    content = {"global_step": 7, "fingerprint": TEXT, STATE: {}, "hyper_parameters": {"config": config(folder)}}
    path = store(folder, **{**content, **saved})
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    return path


def branch(folder: Path, path: Path, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a run that goes on from the checkpoint of another one."""
    return config(folder, start_from=str(path), start_fresh=False, **changes)


def begin(config: dict[str, Any], **options: Any) -> Start:
    """Return the start of a run that nothing refuses: an earlier run has moved."""
    start = prepare(config, **options)
    if start.moves:
        make_room(config)
    return start


def same_text() -> dict[str, str | int]:
    return dict(TEXT)


def other_text() -> dict[str, str | int]:
    return {**TEXT, "corpus": "c" * 64}


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"callbacks__selection": SELECTION}, True),  # it trains, though it stands among what only watches
        ({"callbacks__mine": {"_target_": "mine.Noise"}}, True),
        ({"callbacks__selection": None}, False),
        ({"callbacks__progress": None}, False),
        ({"callbacks__latest": {"minutes": 30}}, False),
        ({"data__cache_dir": "/elsewhere"}, False),
        ({"trainer__val_check_interval": 3}, False),
        ({"trainer__limit_val_batches": 3}, False),
        ({"trainer__enable_checkpointing": True}, False),
        ({"trainer__max_steps": 31}, True),
        ({"seed": 3}, True),
    ],
    ids=str,
)
def test_what_trains_differently_counts_and_what_only_watches_does_not(
    tmp_path: Path, changes: dict[str, Any], counts: bool
):
    assert bool(differences(config(tmp_path), config(tmp_path, **changes))) is counts


def test_an_unfinished_run_goes_on_only_with_its_own_text(tmp_path: Path):
    """A folder of texts that had grown since, and a tokenizer that was made anew, went unnoticed."""
    folder = tmp_path / "run"
    last = leave(folder)
    assert prepare(config(folder), fingerprint=same_text).checkpoint == last
    with pytest.raises(CheckpointError, match=r"data's corpus \(a{12}\.\.\. there, c{12}\.\.\. here\).*resume=never"):
        prepare(config(folder), fingerprint=other_text)
    with pytest.raises(CheckpointError, match=r"it differs in the data's corpus \(a{12}"):
        prepare(branch(tmp_path / "other", last), fingerprint=other_text)
    assert last.is_dir(), "nothing was moved"
    leave(folder, fingerprint=None)
    assert prepare(config(folder), fingerprint=other_text).checkpoint == last, "an older checkpoint does not say"


@pytest.mark.parametrize(("key", "content"), [("data__path", "corpus"), ("data__tokenizer", "tokenizer")])
def test_a_text_that_has_moved_is_the_same_run(tmp_path: Path, key: str, content: str):
    """A run on the same bytes at another path was refused, or, finished, moved aside and trained again."""
    folder, elsewhere, name = tmp_path / "run", {key: "/disk2/texts.json"}, key.replace("__", ".")

    def other() -> dict[str, str | int]:
        return {**TEXT, content: "c" * 64}

    last = leave(folder)
    assert prepare(config(folder, **elsewhere), fingerprint=same_text).checkpoint == last
    with pytest.raises(CheckpointError, match=name):
        prepare(config(folder, **elsewhere), fingerprint=other)
    assert prepare(branch(tmp_path / "other", last, **elsewhere), fingerprint=same_text).checkpoint == last
    with pytest.raises(CheckpointError, match=name):
        prepare(branch(tmp_path / "other", last, **elsewhere), fingerprint=other)
    leave(folder, "finished")
    assert finished(config(folder, **elsewhere), same_text) and not finished(config(folder, **elsewhere), other)
    assert finished(config(folder), lambda: pytest.fail("the same path: planning reads no text"))
    assert prepare(config(folder, **elsewhere), fingerprint=same_text).finished
    assert prepare(config(folder, **elsewhere), fingerprint=other).moves
    for unknown in (None, {"context": 32}):  # an older checkpoint, and data of one's own
        leave(folder, "finished", fingerprint=unknown)
        assert not finished(config(folder, **elsewhere), same_text)


def test_an_unfinished_run_of_another_configuration_is_not_moved_without_a_word(tmp_path: Path):
    """A misspelt value moved days of training aside, and the run began at step 0."""
    last = leave(tmp_path / "run")
    changed = config(tmp_path / "run", data__context=16)

    def never() -> dict[str, str | int]:
        raise AssertionError("the data need not be made to see that")

    with pytest.raises(
        CheckpointError, match=r"at step 7, differs in data.context \(32 there, 16 here\).*resume=never"
    ):
        prepare(changed, fingerprint=never)
    assert last.is_dir()
    assert begin({**changed, "resume": "never"}).moves
    assert not last.exists()


def test_a_finished_run_is_left_as_it_is(tmp_path: Path):
    """A kill after `finished` was written, and the same command trained all of it again."""
    last = leave(tmp_path / "run", "finished")
    start = prepare(config(tmp_path / "run"), fingerprint=same_text)
    assert start.finished and start.checkpoint is None and "is finished already" in start.sentence
    assert last.is_dir()
    assert not prepare(config(tmp_path / "run", resume="never")).finished


def test_a_finished_run_on_other_text_or_measured_otherwise_is_moved_aside(tmp_path: Path):
    leave(tmp_path / "run", "finished")
    start = begin(config(tmp_path / "run"), fingerprint=other_text)
    assert "finished and its configuration differs in the data's corpus" in start.reason
    leave(tmp_path / "run", "finished")
    assert "in trainer.limit_val_batches" in prepare(config(tmp_path / "run", trainer__limit_val_batches=1)).reason


def test_an_interrupted_move_of_a_run_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The process is killed after the first file; one of the files marks the folder as a run's."""
    leave(tmp_path / "run/train", "finished")
    (tmp_path / "run/summary.json").write_text("{}")
    (tmp_path / "run/results").mkdir()
    moved, move = [], run_folder.shutil.move

    def move_once(path: Path, target: Path) -> None:
        assert not moved, "killed"
        moved.append(move(path, target))

    monkeypatch.setattr(run_folder.shutil, "move", move_once)
    with pytest.raises(AssertionError, match="killed"):
        begin(config(tmp_path / "run", resume="never"))
    monkeypatch.setattr(run_folder.shutil, "move", move)
    begin(config(tmp_path / "run", resume="never"))
    assert not [path.name for path in (tmp_path / "run").iterdir()]


def test_a_damaged_summary_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Once it counted as missing, and training went on without a message."""
    last = leave(tmp_path / "run", "finished")
    (tmp_path / "run/summary.json").write_text('{"status": "fin')
    assert prepare(config(tmp_path / "run"), fingerprint=same_text).checkpoint == last
    assert re.search(r"run/summary.json is damaged .*. Delete it", capsys.readouterr().err)


def test_an_earlier_run_stays_in_its_place_until_the_start_makes_room(tmp_path: Path):
    """Once a refused command moved a finished run away."""
    last = leave(tmp_path / "run", "finished")
    changed = config(tmp_path / "run", seed=4)
    assert prepare(changed).moves and finished(config(tmp_path / "run"))
    assert newest(make_room(changed)) is not None and not last.exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_checkpoint_that_would_have_to_make_room_is_no_start(tmp_path: Path, fresh: bool):
    """Once it was moved away, and then missing."""
    origin = leave(tmp_path / "run", "finished")
    with pytest.raises(
        ConfigError, match=f"start_from={origin} is not allowed because it lies in the folder of the new"
    ):
        prepare(branch(tmp_path / "run", origin, resume="never") | {"start_fresh": fresh})
    other = branch(tmp_path / "other", origin) | {"start_fresh": fresh}
    assert prepare(other).checkpoint == (None if fresh else origin)


def test_notes_of_hydra_alone_are_no_earlier_run(tmp_path: Path):
    """Each repetition of a start that Lightning refused moved two yamls to `.replaced`."""
    (tmp_path / "run/.hydra").mkdir(parents=True)
    assert not prepare(config(tmp_path / "run")).moves


def test_a_branch_keeps_the_curve_of_the_run_that_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once the curve was cut at the step of the branch, and then moved."""
    monkeypatch.setattr(fit.report, "header", lambda *_: "")
    origin = leave(tmp_path / "old")
    leave(tmp_path / "run", "finished")
    file = MetricsFile(tmp_path / "run/metrics.csv")
    for step in (5, 7, 9):
        file.log_metrics({"train/loss": 1.0}, step)
    curve = file.path.read_text()
    settings = branch(tmp_path / "run", origin, resume="never")
    trainer, summary = SimpleNamespace(loggers=[file]), SimpleNamespace(facts={})
    parts: Any = SimpleNamespace(config=settings, trainer=trainer, data=SimpleNamespace(resumes=True), summary=summary)
    with contextlib.ExitStack() as stack:
        fit._begin(parts, prepare(settings), stack)
    assert not file.path.exists()
    (moved,) = (tmp_path / "logs/.replaced").rglob("metrics.csv")
    assert moved.read_text() == curve


@pytest.mark.parametrize("branches", [True, False])
def test_parts_that_are_damaged_have_a_remedy_that_helps(tmp_path: Path, branches: bool):
    """Once a branch got the advice resume=never, which reads the same parts again."""
    settings = branch(tmp_path / "run", leave(tmp_path / "old")) if branches else config(tmp_path / "run")
    if not branches:
        leave(tmp_path / "run")

    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointError("a part is missing")

    trainer = SimpleNamespace(callbacks=[], is_global_zero=False, fit=refuse)
    parts: Any = SimpleNamespace(config=settings, trainer=trainer, task=None, data=None)
    remedy = "another start_from=, or start_fresh=true" if branches else "resume=never to start over"
    with pytest.raises(CheckpointError, match=f"^a part is missing; use {remedy}"):
        fit._fit(parts, prepare(settings))


def test_a_finished_run_with_another_configuration_is_moved_aside(tmp_path: Path):
    leave(tmp_path / "run", "finished")
    reason = prepare(config(tmp_path / "run", seed=4)).reason
    assert "it is finished and its configuration differs in seed (0 there, 4 here)" in reason
    longer = begin(config(tmp_path / "run", trainer__max_steps=40))
    assert "it is finished and its configuration differs in trainer.max_steps (30 there, 40 here)" in longer.reason
    assert longer.checkpoint is None and not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"global_batch": 4}, r"global_batch \(8 there, 4 here\)"),
        ({"model__state_size": 6}, r"model.state_size \(.* there, 6 here\)"),
        ({"optimizer__learning_rate": 0.5}, r"optimizer.learning_rate \(.* there, 0.5 here\)"),
        ({"seed": 3}, r"seed \(0 there, 3 here\)"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused_with_what_differs(
    tmp_path: Path, changes: dict[str, Any], difference: str
):
    last = leave(tmp_path / "old")
    with pytest.raises(CheckpointError, match=f"cannot go on with this configuration: it differs in {difference}"):
        prepare(branch(tmp_path / "run", last, **changes))


def test_a_branch_is_not_undone_by_the_same_command(tmp_path: Path):
    """Once the repeated command began at the path again, and lost the training."""
    origin = leave(tmp_path / "pretrained", "finished")
    settings = branch(tmp_path / "run", tmp_path / "pretrained")
    assert prepare(settings, fingerprint=same_text).checkpoint == origin
    last = leave(tmp_path / "run", started_from=begins(settings))
    assert prepare(settings, fingerprint=same_text).checkpoint == last
    with pytest.raises(CheckpointError, match="the weights it starts from"):
        prepare(config(tmp_path / "run"), fingerprint=same_text)


def test_a_run_that_is_shorter_than_the_checkpoint_it_begins_with_is_refused(tmp_path: Path):
    """It trained nothing, and was called finished with more steps than it had; as many are left to be validated."""
    origin = leave(tmp_path / "old")
    with pytest.raises(CheckpointError, match=f"trainer.max_steps=6 is not allowed because {origin} is of step 7"):
        prepare(branch(tmp_path / "run", origin, trainer__max_steps=6))
    assert prepare(branch(tmp_path / "run", origin, trainer__max_steps=7)).step == 7


def test_what_to_type_starts_nothing_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command_line, "prepared", True)
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=1", "name=old run", "resume=never"])
    assert command_line.again().split(" ", 1)[1] == "train.py seed=1 'name=old run'"


@pytest.mark.parametrize(("batch", "devices"), [(8, 1), (1, 4), (2, "auto")])
def test_a_step_may_be_divided_otherwise(tmp_path: Path, batch: int, devices: int | str):
    """What four devices have begun, two can end: global_batch stays."""
    last = leave(tmp_path / "run")
    options = {"trainer__devices": devices, "data__batch_size": batch}
    assert prepare(config(tmp_path / "run", **options)).checkpoint == last
    assert prepare(branch(tmp_path / "other", last, **options)).checkpoint == last
    with pytest.raises(CheckpointError, match=r"differs in .*global_batch \(8 there, 24 here"):
        prepare(config(tmp_path / "run", global_batch=24, **options))


@pytest.mark.parametrize("way", [["trainer=ddp", "trainer.devices=2"], ["trainer=default"]], ids=str)
def test_what_other_devices_have_begun_the_cpu_can_end(way: list[str]):
    """`trainer=cpu` alone was refused: it asked for trainer.accelerator=auto and trainer.precision=auto."""
    begun = compose([*(word for word in TINY if word != "trainer=cpu"), *way, "data.path=/texts", "logs=/logs"])
    assert not differences(begun, composed(), divided=True) and not differences(composed(), begun, divided=True)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_trained_on(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Nothing could be trained on NFS without its daemon of locks, or on Lustre."""

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with run_folder.locked(tmp_path):
        pass
    printed = capsys.readouterr().err
    assert printed.startswith(f"{tmp_path} cannot be locked (") and len(printed.splitlines()) == 1


def test_files_that_are_no_run_are_not_moved(tmp_path: Path):
    """`folder=.` moved everything that lay in the working folder."""
    (tmp_path / "thesis.tex").write_text("x")
    (tmp_path / "events.out.tfevents.1").write_text("x")
    for resume in ("auto", "never"):
        with pytest.raises(ConfigError, match=r"holds thesis\.tex, which no run has written\. Use an empty folder="):
            prepare(config(tmp_path, resume=resume))
    assert (tmp_path / "thesis.tex").is_file()
    (tmp_path / "thesis.tex").unlink()
    assert begin(config(tmp_path, logs=str(tmp_path.with_name("aside")))).moves


def test_a_run_that_was_measured_otherwise_is_trained_again_for_a_table(tmp_path: Path):
    leave(tmp_path, "finished")
    assert finished(config(tmp_path))
    assert finished(config(tmp_path, trainer__val_check_interval=7))
    assert not finished(config(tmp_path, trainer__limit_val_batches=1))
    assert not finished(config(tmp_path, seed=1))


def test_a_text_shorter_than_a_sequence_is_one_sentence(tmp_path: Path):
    (tmp_path / "text").mkdir()
    tiny_text.write(tmp_path / "text")
    data = {**composed()["data"], "path": str(tmp_path / "text"), "cache_dir": str(tmp_path), "context": 1_000_000}
    with pytest.raises(ConfigError, match="^data: "):
        fit.open_data({"data": data})


def test_a_save_that_takes_long_is_not_repeated_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a checkpoint of minutes and minutes=2, half of the time went into saving."""
    now, saves = [0.0], []
    monkeypatch.setattr("gsm.training.callbacks.checkpoints.time.monotonic", lambda: now[0])

    def save(path: Path, weights_only: bool) -> None:
        now[0] += 60.0
        saves.append(now[0])

    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer: Any = SimpleNamespace(global_step=1, loggers=[], save_checkpoint=save, strategy=strategy)
    latest = Latest(tmp_path, minutes=2)
    trainer.callbacks, trainer.is_global_zero = [latest], True
    latest.on_train_start(trainer, trainer)
    while now[0] < 3000:
        now[0] += 10.0
        trainer.global_step += 1
        latest.on_train_batch_start(trainer, trainer, None, 0)
    assert saves == [190.0, 1460.0, 2730.0], "once after two minutes, then a minute in every twenty-one"


def test_the_exit_code_is_that_of_the_signal_also_before_training_begins():
    """Lightning has its own handlers until then, and a SIGTERM was reported as Ctrl-C."""
    assert fit._exit_code(SIGTERMException()) == 128 + signal.SIGTERM
    assert fit._exit_code(Interrupted(signal.SIGUSR1)) == 128 + signal.SIGUSR1
    assert fit._exit_code(SystemExit(1)) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("saved", "words"),
    [(None, "step 9 of 30; nothing was saved"), (9, "9 of 30, and saved;"), (6, "30, saved at step 6;")],
)
def test_the_farewell_names_only_checkpoints_of_this_run(tmp_path: Path, saved: int | None, words: str):
    """Once the farewell claimed a checkpoint that an earlier part of the run had saved."""
    latest = Latest(leave(tmp_path))
    latest.saved = saved
    run: Any = SimpleNamespace(trainer=SimpleNamespace(global_step=9, max_steps=30, callbacks=[latest]))
    assert words in fit._farewell(run)


def test_lines_that_are_garbled_are_dropped(tmp_path: Path):
    """A disk that had lost power left zeros in the middle, and the run could not go on: int() refused them."""
    file = MetricsFile(tmp_path / "metrics.csv")
    file.path.write_bytes(
        b"step,name,value\n1,train/loss,1\n\0\0\0\n\xff,x,1\n2,train/loss,0.5\n2,val/loss\n3,a,1\n1,val/lo"
    )
    file.rewind(2)
    assert file.path.read_text() == "step,name,value\n1,train/loss,1\n2,train/loss,0.5\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_generate_says_that_there_is_no_gpu(tmp_path: Path):
    with pytest.raises(ConfigError, match="^device is 'cuda', but PyTorch cannot use it"):
        generate(str(leave(tmp_path)), device="cuda")
