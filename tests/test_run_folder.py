"""A run in its folder: it is finished, goes on, begins, or waits; the checkpoints here hold no weights."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from short_runs import TINY
from stored import store

from gsm.config.address import address
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import CheckpointError
from gsm.config.stored import checkpoint_folder, digest, named, origin
from gsm.training import run as fit
from gsm.training.callbacks.interruption import Interrupted
from gsm.training.folder import Begin, begin, compared_with_last, finished, held, note
from gsm.training.resume import STATE

TEXT = {"corpus": "a" * 64, "tokenizer": "b" * 64, "context": 32}
OTHER = {**TEXT, "corpus": "c" * 64}


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


def leave(folder: Path, status: str = "interrupted", started: str = "", **saved: Any) -> Path:
    """Write the folder of a run that ended at step 7, and return its checkpoint."""
    content = {"global_step": 7, "fingerprint": TEXT, STATE: {}, "hyper_parameters": {"config": config(folder)}} | saved
    path = store(folder, **content)
    note(config(folder))
    facts = {"status": status, "started": started, "steps": content["global_step"]}
    (folder / "summary.json").write_text(json.dumps(facts))
    return path


def trained_on(folder: Path, path: Path, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a run that trains on from the checkpoint of another one."""
    return config(folder, start_from=str(path), start_fresh=False, **changes)


def test_an_unfinished_run_goes_on_only_with_its_own_text(tmp_path: Path):
    last = leave(tmp_path / "run")
    assert begin(config(tmp_path / "run"), TEXT) == Begin(last, 7, own=True)
    with pytest.raises(ConfigError, match="corpus .*a{12}.*c{12}"):
        begin(config(tmp_path / "run"), OTHER)
    with pytest.raises(ConfigError, match="^start_fresh .*corpus"):
        begin(trained_on(tmp_path / "other", last), OTHER)
    assert last.is_dir()


def test_a_text_that_has_moved_is_the_same_run(tmp_path: Path):
    """Only then are the data of a finished run opened: planning reads no text."""
    folder = tmp_path / "run"
    leave(folder, "finished")
    elsewhere = config(folder, data__path="/disk2/texts")
    assert address(elsewhere) == address(config(folder))
    assert finished(config(folder), lambda: pytest.fail("the same path"))
    assert finished(elsewhere, lambda: TEXT)
    with pytest.raises(ConfigError, match="corpus"):
        finished(elsewhere, lambda: OTHER)


def test_a_run_is_not_finished_without_its_last_step(tmp_path: Path):
    best = leave(tmp_path / "run", global_step=5)
    last = leave(tmp_path / "run", "finished")
    assert finished(config(tmp_path / "run"), lambda: TEXT)
    (last / "state.json").unlink()
    assert not finished(config(tmp_path / "run"), lambda: TEXT), "its best step was taken for its end"
    assert begin(config(tmp_path / "run"), TEXT) == Begin(best, 5, own=True)
    assert origin(str(tmp_path / "run"))[1]["step"] == 5
    (best / "state.json").unlink()
    assert not finished(config(tmp_path / "run"), lambda: TEXT)


def test_other_weights_at_the_start_are_noticed(tmp_path: Path):
    parent = leave(tmp_path / "parent", "finished")
    child = trained_on(tmp_path / "run", parent)
    leave(tmp_path / "run", started_from=digest(parent))
    assert begin(child, TEXT).own
    store(
        tmp_path / "parent", state_dict={"model.x": torch.ones(3)}, global_step=7, training_state={}, fingerprint=TEXT
    )
    with pytest.raises(ConfigError, match="start_from"):
        begin(child, TEXT)


def test_a_damaged_step_has_a_remedy(tmp_path: Path):
    before = leave(tmp_path / "run")
    last = leave(tmp_path / "run", global_step=9)
    (last / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=f"remove .*{last.name} .*{before.name}"):
        begin(config(tmp_path / "run"), TEXT)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"global_batch": 4}, "global_batch"),
        ({"model__state_size": 6}, "model.state_size"),
        ({"optimizer__learning_rate": 0.5}, "optimizer.learning_rate"),
        ({"seed": 3}, "seed"),
    ],
)
def test_a_run_trains_on_only_with_the_settings_of_the_other(tmp_path: Path, changes: dict[str, Any], key: str):
    last = leave(tmp_path / "old")
    with pytest.raises(ConfigError, match=rf"^start_fresh .*{key} \("):
        begin(trained_on(tmp_path / "run", last, **changes), TEXT)
    ending = {"trainer__max_steps": 40, "optimizer__decay_fraction": 0.5}
    assert begin(trained_on(tmp_path / "run", last, **ending), TEXT) == Begin(last, 7)
    assert begin(trained_on(tmp_path / "run", last, data__batch_size=2, trainer__devices=4), TEXT) == Begin(last, 7)


def test_another_size_is_named_before_the_values_that_it_brings(tmp_path: Path):
    last = leave(tmp_path / "old")
    pico = {**config(tmp_path)["choices"], "size": "pico"}
    with pytest.raises(ConfigError, match=r"^start_fresh .* size \(nano there, pico here\), global_batch \("):
        begin(trained_on(tmp_path / "run", last, choices=pico, global_batch=4), TEXT)


def test_a_run_that_is_shorter_than_the_step_it_begins_with_is_refused(tmp_path: Path):
    last = leave(tmp_path / "old")
    with pytest.raises(CheckpointError, match="^trainer.max_steps .* 7,"):
        begin(trained_on(tmp_path / "run", last, trainer__max_steps=6), TEXT)
    assert begin(trained_on(tmp_path / "run", last, trainer__max_steps=7), TEXT).step == 7


def test_a_model_alone_is_not_trained_on(tmp_path: Path):
    with pytest.raises(CheckpointError, match="needle_gsm"):
        begin(trained_on(tmp_path / "run", Path("needle_gsm")), TEXT)


def test_a_new_run_beside_one_of_its_label_names_what_differs(tmp_path: Path):
    """A typing error in a repeated command starts a run from nothing, and should be seen."""
    assert compared_with_last(config(tmp_path / "gsm-seed0-11111111", label="gsm-seed0")) == ""
    leave(tmp_path / "gsm-seed0-22222222", started="2026-01-01")
    leave(tmp_path / "gsm-seed0-33333333", started="2026-01-02")
    new = config(tmp_path / "gsm-seed0-11111111", label="gsm-seed0", optimizer__learning_rate=0.5)
    assert "gsm-seed0-33333333: it differs in optimizer.learning_rate (" in compared_with_last(new)


def test_the_address_of_a_run_may_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, status, started in (
        ("gsm-seed1-11111111", "finished", "2026-01-01"),
        ("gsm-seed1-22222222", "finished", "2026-01-02"),
        ("gsm-seed1-33333333", "interrupted", "2026-01-03"),
        ("gsm-seed10-44444444", "finished", "2026-01-04"),
    ):
        leave(tmp_path / name, status, started)
    assert [path.name[-8:] for path in named(tmp_path / "gsm-seed1")] == ["1" * 8, "2" * 8, "3" * 8]
    assert checkpoint_folder(tmp_path / "gsm-seed1").parents[1].name == "gsm-seed1-22222222"
    assert "gsm-seed1-22222222, the newest of 3 runs" in capsys.readouterr().err
    assert checkpoint_folder(tmp_path / "gsm-seed10").parents[1].name == "gsm-seed10-44444444"
    assert not capsys.readouterr().err
    with pytest.raises(ConfigError, match="^start_from .*gsm-seed1-11111111"):
        origin(str(tmp_path / "gsm-seed1"))


def test_the_origin_of_weights_is_a_run_and_its_step_or_the_weights_themselves(tmp_path: Path):
    last = leave(tmp_path / "run")
    here = address(config(tmp_path / "run"))
    assert origin(str(last))[1]["run"] == here and origin(str(last))[1]["step"] == 7
    leave(tmp_path / "run", "finished")
    assert origin(str(tmp_path / "run"))[1] == {**origin(str(last))[1], "step": None}, "its end has no number"
    assert origin("needle_gsm")[1].keys() == {"weights"}


WAITS = """
import sys
from pathlib import Path
from gsm.training.folder import held
config = {CONFIG}
with held(config) as found:
    print("held", found["folder"], flush=True)
    Path(found["folder"]).mkdir(exist_ok=True)
    sys.stdin.read()
"""


def test_a_second_process_waits_and_finds_the_folder_of_the_first(tmp_path: Path):
    """It has another label, and so would have another folder."""
    one, two = (config(tmp_path / f"{label}-{address(composed())}", label=label) for label in ("one", "two"))

    def started(made: dict[str, Any]) -> subprocess.Popen[str]:
        program = WAITS.replace("{CONFIG}", repr(made))
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)

    first = started(one)
    assert first.stdout
    held_by_first = first.stdout.readline()
    second = started(two)
    assert second.stdout and f"Waiting for process {first.pid} on" in second.stdout.readline()
    first.communicate("end")
    assert held_by_first and second.communicate("end")[0] == held_by_first


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_trained_on(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch):
    """The file names the process that trains; where there is none, nothing is refused."""

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    made = config(tmp_path / f"x-{address(composed())}")
    with held(made), pytest.raises(ConfigError, match=rf" {os.getpid()} .*\.locks"), held(made):
        pass
    with held(made):
        pass


def test_the_exit_code_is_that_of_the_signal_also_before_training_begins():
    """Lightning has its own handlers until then, and a SIGTERM was reported as Ctrl-C."""
    assert fit._exit_code(SIGTERMException()) == 128 + signal.SIGTERM
    assert fit._exit_code(Interrupted(signal.SIGUSR1)) == 128 + signal.SIGUSR1
    assert fit._exit_code(SystemExit(1)) == 128 + signal.SIGINT
