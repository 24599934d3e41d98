"""The folder of a run: one process at a time, what lies there already, and where training goes on from."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsm.callbacks.files import sweep
from gsm.runs.check import ConfigError
from gsm.runs.load import CheckpointError, read_checkpoint

OWN = {".hydra", ".lock"}  # written for the new run before it looks at the folder
DECISIVE = {"model", "size", "data", "optimizer", "trainer", "seed"}  # what else a configuration holds trains nothing
IDLE = {"data.cache_dir", "data.num_workers"}
# What a checkpoint that was asked for by its path has to share; length, device and validations may be others.
BOUND = {"trainer.accumulate_grad_batches", "trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"}


@dataclass(frozen=True)
class Start:
    """Where a run starts: from a checkpoint, or from nothing; and a sentence about it (empty: nothing to tell).

    What was logged at ``step`` and after it does not count any more.
    """

    checkpoint: Path | None = None
    sentence: str = ""
    step: int = 0


def prepare(config: Mapping[str, Any], leads: bool = True) -> Start:
    """Decides, by ``config["resume"]``, whether to go on or to start over; no run is ever deleted.

    * ``auto``: an unfinished run of the same configuration goes on from its last checkpoint;
    * ``never``: start over;
    * a path: go on from that checkpoint, if the configuration trains the same model on the same data in the same way.

    A run that starts over in a used folder moves what lies there to ``<logs>/.replaced/<name>/<arm>/seed<k>-<n>``; of
    several processes that train together, the one that ``leads`` does.

    Raises:
        CheckpointError: the checkpoint to go on from cannot be read, or is of another configuration.
        OSError: the folder cannot be written to.
    """
    folder, resume = Path(config["folder"]), str(config["resume"])
    folder.mkdir(parents=True, exist_ok=True)
    if leads:
        sweep(folder, folder / "checkpoints")
    if resume not in ("auto", "never"):
        return _from_path(Path(resume), config, leads)
    last = folder / "checkpoints" / "last.ckpt"
    reason = ""
    if resume == "auto" and last.is_file():
        checkpoint = _read_last(last)
        changes = differences(checkpoint["hyper_parameters"]["config"], config)
        finished = _status(folder) == "finished"
        if not changes and not finished:
            sentence = f"Going on with the unfinished run in {folder} (resume=never starts over)."
            return Start(last, sentence, _first_open(checkpoint))
        reason = _why_over(finished, changes, checkpoint["global_step"])
    moved = _move_aside(folder, config) if leads else None
    return Start(None, f"An earlier run in this folder was moved to {moved}{reason}." if moved else "")


def finished(config: Mapping[str, Any]) -> bool:
    """Whether the run of this configuration lies in ``config["folder"]``, trained to its end.

    Raises CheckpointError where a run was finished, but its checkpoint is broken.
    """
    folder = Path(config["folder"])
    last = folder / "checkpoints" / "last.ckpt"
    if _status(folder) != "finished" or not last.is_file():
        return False
    return not differences(read_checkpoint(last)["hyper_parameters"]["config"], config)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], by_path: bool = False) -> list[str]:
    """What two configurations train differently: ``data.batch_size (4 there, 8 here)``; empty if they train the same.

    Args:
        old, new: composed configurations.
        by_path: compare only what a checkpoint cannot do without.
    """
    first, second = _flat(old), _flat(new)
    return [
        f"{key} ({first.get(key, 'nothing')} there, {second.get(key, 'nothing')} here)"
        for key in sorted(first.keys() | second.keys(), key=lambda key: (key.startswith("model."), key))
        if first.get(key) != second.get(key) and _matters(key, by_path)
    ]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process. Raises ConfigError where another one is training there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is training in {folder}: choose another seed=, arm= or name="
            ) from error
        yield


def _status(folder: Path) -> str | None:
    """How the last run in this folder ended; None if it did not say."""
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("status")
    except (OSError, ValueError):
        return None


def _from_path(path: Path, config: Mapping[str, Any], leads: bool) -> Start:
    """Goes on from a checkpoint of this or another folder. Raises CheckpointError where it does not fit."""
    checkpoint = read_checkpoint(path)
    path = (path / "checkpoints" / "last.ckpt" if path.is_dir() else path).resolve()
    changes = differences(checkpoint["hyper_parameters"]["config"], config, by_path=True)
    if changes:
        raise CheckpointError(
            f"{path} cannot go on with this configuration: it differs in {_few(changes)}; give the same values, or "
            "resume=never to start over"
        )
    step, steps = checkpoint["global_step"], config["trainer"]["max_steps"]
    planned = checkpoint["hyper_parameters"]["config"]["trainer"]["max_steps"]
    sentence = f"Going on from {path}, step {step}."
    if planned != steps:
        sentence += f" It was to have {planned} steps and is to have {steps}: from here on, the learning rate follows "
        sentence += "the curve of the new length, so it jumps."
    if leads and Path(config["folder"]).resolve() not in path.parents:
        moved = _move_aside(Path(config["folder"]), config)
        sentence += f" An earlier run in this folder was moved to {moved}." if moved else ""
    return Start(path, sentence, _first_open(checkpoint))


def _read_last(last: Path) -> dict[str, Any]:
    """``last.ckpt``; where it is broken, the error says what can be done instead of starting over without a word."""
    try:
        return read_checkpoint(last)
    except CheckpointError as error:
        remedy = "resume=never starts over"
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            best = last.with_name("best.ckpt")
            remedy = f"resume={best} goes on from step {read_checkpoint(best)['global_step']}, {remedy}"
        raise CheckpointError(f"{error}; {remedy}") from error


def _first_open(checkpoint: Mapping[str, Any]) -> int:
    """The first step whose log is to be written again: the checkpoint's own, which it brings along, or the next."""
    return checkpoint["global_step"] + ("standing" not in checkpoint)


def _why_over(finished: bool, changes: list[str], step: int) -> str:
    """Why a run with a checkpoint does not go on, to be put after where it was moved to."""
    if not changes:
        return ": it is finished"
    if finished and len(changes) == 1 and changes[0].startswith("trainer.max_steps "):
        return (
            f": it is finished, after {step} steps, and one of another length is another run, as the learning rate "
            "depends on it (to prolong it all the same: resume=<its last.ckpt>)"
        )
    return f": {'it is finished and ' if finished else ''}its configuration differs in {_few(changes)}"


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Every value of nested mappings under the path to it."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def _matters(key: str, by_path: bool) -> bool:
    head = key.partition(".")[0]
    return head in DECISIVE and key not in IDLE and not (by_path and head == "trainer" and key not in BOUND)


def _few(changes: list[str]) -> str:
    return ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")


def _move_aside(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Moves an earlier run's files out of the way, checkpoints first; returns where to, None if there was nothing."""
    found = [path for path in folder.iterdir() if path.name not in OWN and path.suffix != ".log"]
    if not found:
        return None
    parent = Path(config["logs"]) / ".replaced" / str(config["name"]) / str(config["arm"])
    taken = {path.name for path in parent.glob("*")} if parent.is_dir() else set()
    target = next(parent / name for n in range(1, len(taken) + 2) if (name := f"{folder.name}-{n}") not in taken)
    target.mkdir(parents=True)
    for path in sorted(found, key=lambda path: path.name != "checkpoints"):
        shutil.move(path, target / path.name)
    return target
