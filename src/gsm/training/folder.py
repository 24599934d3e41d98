"""The folder of a run (``gsm.config.address``): one process at a time, and whether it is finished or goes on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from gsm.checkpoint import CheckpointError, check, newest, steps
from gsm.config.address import CONFIG, address, differences, find, moved, noted
from gsm.config.check import ConfigError, contrast, few, flat, unlike
from gsm.config.command_line import path_text
from gsm.config.stored import checkpoint_folder, digest, is_finished, named, read_checkpoint, started
from gsm.files import sweep, write_whole
from gsm.training.resume import STATE


@contextlib.contextmanager
def held(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Lock the address of a run for this process; if another process trains the run, wait for it first.

    Yields the configuration, with the folder that another process may have made meanwhile.

    Raises ConfigError if the folder cannot be made, or if the disk has no locks and another process holds the address.
    """
    digits, folder = address(config), Path(config["folder"])
    file = folder.parent / ".locks" / digits
    made = [path for path in file.parents if not path.exists()]
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(_locked(file, folder))
        owner.truncate(0)
        owner.write(f"process {os.getpid()} on {socket.gethostname()}")
        owner.flush()
        try:
            there = find(folder.parent, digits)
            yield moved(config, str(folder), str(there)) if there else config
        finally:
            file.unlink(missing_ok=True)
            for path in (file.parent, *made):
                with contextlib.suppress(OSError):  # it is not empty
                    path.rmdir()


def is_held(folder: Path) -> bool:
    """Return whether a process holds the run in a folder now. Without file locks it may be one that was killed."""
    file = folder.parent / ".locks" / folder.name.rpartition("-")[2]
    try:
        with file.open() as owner:
            fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # it is locked, or the file system has no locks
        return True
    return False


def _locked(file: Path, folder: Path) -> TextIO:
    """Return the file of an address, open and locked. Raises ConfigError where it cannot be made, or where the disk has
    no locks and another process has it."""
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:
            raise ConfigError(f"logs must be a folder that can be made, got {file.parents[2]}") from error
        try:
            owner = file.open("a+")
        except FileNotFoundError:  # another process, which has ended, has just removed the folder
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner.seek(0)
            print(f"Waiting for {owner.read()}, which trains {path_text(folder)}.", flush=True)
            fcntl.flock(owner, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            owner.seek(0)
            if text := owner.read():
                owner.close()
                raise ConfigError(
                    f"{path_text(folder)} is held by {text}: if it has ended, remove {path_text(file)}"
                ) from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(owner.fileno()), file.stat()):
                return owner
        owner.close()  # the process before has removed it


def finished(config: Mapping[str, Any], fingerprint: Callable[[], Mapping[str, str | int]]) -> bool:
    """Return whether a run is trained to its end and measured.

    Args:
        config: of the run.
        fingerprint: returns that of its data; called if their path has changed.

    Raises ConfigError if the data, or the weights that it started from, have changed since.
    """
    folder = Path(config["folder"])
    if not is_finished(folder):
        return False
    there, here = flat(noted(folder)), flat(config)
    if any(there.get(key) != here.get(key) for key in config["address"]["paths"] if key in there):
        refuse_others(config, read_checkpoint(folder, weights=False), fingerprint())
    return True


@dataclass(frozen=True)
class Begin:
    """Where training begins.

    Attributes:
        checkpoint: the folder of a step, with its optimiser; None: a fresh start.
        step: its number.
        own: True for a step of this run, False for one of the run that it branches from.
    """

    checkpoint: Path | None = None
    step: int = 0
    own: bool = False


def begin(config: Mapping[str, Any], fingerprint: Mapping[str, str | int]) -> Begin:
    """Return where a run begins: at its own last step, else at the step of the run that it branches from.

    Args:
        config: of the run.
        fingerprint: of its data.

    Raises:
        CheckpointError: the step is damaged, has no training state, or lies after trainer.max_steps.
        ConfigError: the data, or the weights that the run started from, have changed since; or the run branches from
            one with other settings than those of the end of the training.
    """
    folder = Path(config["folder"])
    sweep(folder)
    if last := newest(folder):
        try:
            facts = _read(last)
        except (CheckpointError, FileNotFoundError) as error:
            before = [step.name for step in steps(folder) if step != last]
            remedy = f", or {path_text(last)} to go on from {before[-1]}" if before else ""
            raise CheckpointError(f"{error}; remove {path_text(folder)} to start over{remedy}") from error
        refuse_others(config, facts, fingerprint)
        return Begin(last, facts["global_step"], own=True)
    if config["start_from"] and not config["start_fresh"]:
        path = checkpoint_folder(config["start_from"])
        return Begin(path, _trained_on(path, config, fingerprint))
    return Begin()


def refuse_others(config: Mapping[str, Any], facts: Mapping[str, Any], fingerprint: Mapping[str, str | int]) -> None:
    """Raise ConfigError if the data, or the weights that a run started from, have changed since.

    Args:
        config: of the run.
        facts: of one of its steps.
        fingerprint: of the data now.
    """
    changes = unlike(facts["fingerprint"], fingerprint)
    before, now = facts.get("started_from"), digest(config["start_from"])
    changes += contrast({"start_from": f"{before:.12}"}, {"start_from": f"{now:.12}"}, ["start_from"]) if before else []
    if changes:
        folder = path_text(config["folder"])
        raise ConfigError(f"{folder} differs in {few(changes)}: remove the folder to start over, or take another name=")


def _trained_on(path: Path, config: Mapping[str, Any], fingerprint: Mapping[str, str | int]) -> int:
    """Return the number of the step that a run branches from. Raises as `begin`."""
    facts = _read(path)
    theirs, free = facts["hyper_parameters"]["config"], config["address"]["branch"]
    if changes := differences(theirs, config, without=free) or unlike(facts["fingerprint"], fingerprint):
        chosen = contrast(theirs["choices"], config["choices"], ("model", "size"))  # they bring many of the others
        raise ConfigError(
            f"start_fresh must be true for a run that differs from start_from in {few([*chosen, *changes])}"
        )
    step, last = facts["global_step"], config["trainer"]["max_steps"]
    if step > last:
        raise CheckpointError(f"trainer.max_steps must be at least {step}, the step of {path}, got {last}")
    return step


def _read(path: Path) -> dict[str, Any]:
    """Return the facts of a step that training can go on from. Raises CheckpointError."""
    facts = read_checkpoint(path, weights=False)
    if STATE not in facts:
        raise CheckpointError(f"training cannot go on from {path}: it has no training state")
    check(path)
    return facts


def note(config: Mapping[str, Any]) -> None:
    """Write the configuration of a run into its folder. Raises OSError."""
    write_whole(Path(config["folder"]) / CONFIG, OmegaConf.to_yaml(OmegaConf.create(dict(config))).encode())


def compared_with_last(config: Mapping[str, Any]) -> str:
    """Return a line that names the keys in which this run differs from the latest one with the same label, or ""."""
    folder = Path(config["folder"])
    labelled = [path for path in named(folder.parent / config["label"]) if path != folder]
    there = noted(max(labelled, key=started)) if labelled else {}
    changes = differences(there, config) if "address" in there else []
    return f"A new run beside {Path(there['folder']).name}: it differs in {few(changes)}." if changes else ""
