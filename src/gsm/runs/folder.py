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

from gsm.runs.check import ConfigError
from gsm.runs.load import read_checkpoint

OWN = {".hydra", ".lock"}  # written for the new run before it looks at the folder
UNIMPORTANT = {
    "resume",
    "sample",
    "logs",
    "folder",
    "compile",
    "logger",
    "callbacks",
}  # may change while a run is interrupted


@dataclass(frozen=True)
class Start:
    """Where a run starts: from a checkpoint, or from nothing; and a sentence about it (empty: nothing to tell)."""

    checkpoint: Path | None = None
    sentence: str = ""


def prepare(config: Mapping[str, Any], leads: bool = True) -> Start:
    """Decides, by ``config["resume"]``, whether to go on or to start over; nothing is ever deleted.

    * ``auto``: an unfinished run of the same configuration goes on from its last checkpoint;
    * ``never``: start over;
    * a path: go on from that checkpoint.

    A run that starts over in a used folder moves what lies there to ``<logs>/.replaced/<name>/<arm>/seed<k>-<n>``; of
    several processes that train together, the one that ``leads`` does.
    """
    folder, resume = Path(config["folder"]), str(config["resume"])
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "checkpoints" / "last.ckpt"
    if resume not in ("auto", "never"):
        read_checkpoint(resume)
        return Start(Path(resume).resolve(), f"Going on from {resume}.")
    unfinished = last.is_file() and _status(folder) != "finished"
    if resume == "auto" and unfinished and _same(read_checkpoint(last)["hyper_parameters"]["config"], config):
        return Start(last, f"Going on with the unfinished run in {folder} (resume=never starts over).")
    moved = _move_aside(folder, config) if leads else None
    return Start(None, f"An earlier run in this folder was moved to {moved}." if moved else "")


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


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two configurations train the same."""
    return all(old.get(key) == new.get(key) for key in (old.keys() | new.keys()) - UNIMPORTANT)


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
