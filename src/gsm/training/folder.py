"""The folder of a run: one process at a time, its files, and the checkpoint that training goes on from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gsm.checkpoint import check, newest, steps
from gsm.config import command_line
from gsm.config.check import ConfigError, contrast, few, flat, parameters, shortened, unlike
from gsm.config.decisive import decides
from gsm.config.load import CheckpointError, checkpoint_folder, read_checkpoint
from gsm.files import damage, read_json, sweep
from gsm.training import weights
from gsm.training.resume import STATE

MARKS = {"summary.json", "checkpoints"}  # every folder of a run that has begun has at least one
# Files of a run without a checkpoint.
LEFT = re.compile(r"events\.out\..*|hparams\.yaml|metrics\.csv|\.hydra|\..*\.partial")
MEASURED = "limit_val_batches"  # changes no weights, but the numbers of a finished run
# Paths of data, and the keys of a fingerprint with what lies there: if that is the same, a path decides nothing.
CONTENTS = {"path": "corpus", "tokenizer": "tokenizer"}
# Makes the fingerprint of the data, only where there is one to compare with.
Fingerprint = Callable[[], Mapping[str, str | int]]


@dataclass(frozen=True)
class Start:
    """The start of a run: a checkpoint, or nothing; and a sentence about it (empty: nothing to report).

    Logged values after ``step`` do not count any more.

    Attributes:
        finished: this very run lies there, trained to its end, and nothing is left to do.
        moves: whether the files in the folder are of an earlier run, which has to make room (``make_room``).
        reason: the reason of that, for a sentence; empty where the command asks for it.
        remedy: the values to use where the checkpoint turns out to be damaged, or of another model.
    """

    checkpoint: Path | None = None
    sentence: str = ""
    step: int = 0
    finished: bool = False
    moves: bool = False
    reason: str = ""
    remedy: str = "resume=never to start over"


def prepare(config: Mapping[str, Any], leads: bool = True, fingerprint: Fingerprint | None = None) -> Start:
    """Decide, by ``config["resume"]``, whether to go on or to start over; nothing is moved yet.

    * ``auto``: an unfinished run goes on from its last checkpoint, if it is of the same configuration and data; ranks
      and their batches may be others if as many sequences make up a step. A finished one is left as it is;
    * ``never``: start over; a branch (``start_fresh=false``) at the checkpoint that it leaves.

    Args:
        config: a composed configuration.
        leads: whether this process may remove what a killed process has half written.
        fingerprint: makes the fingerprint of the data; None: do not compare.

    Raises:
        CheckpointError: the checkpoint to go on from cannot be read, or is of another configuration or other data.
        ConfigError: the folder holds files that are no run's, or an earlier run there has the checkpoint to start from.
        OSError: the folder cannot be written to.
    """
    folder = Path(config["folder"])
    _make(folder)
    if leads:
        if sentence := damage(folder / "summary.json"):
            print(sentence, file=sys.stderr, flush=True)
        sweep(folder)
    last = newest(folder) if config["resume"] != "never" else None
    if last is None:
        return _over(config, fingerprint)
    checkpoint = _read_last(last)
    changes = _changes(checkpoint, config, fingerprint)
    step = checkpoint["global_step"]
    if _status(folder) == "finished":
        if changes:
            reason = f": it is finished and its configuration differs in {few(changes)}"
            return replace(_over(config, fingerprint), reason=reason)
        return Start(sentence=f"The run in {folder} is finished already (resume=never trains it again).", finished=True)
    if changes:
        raise CheckpointError(
            f"training cannot go on because the unfinished run in {folder}, at step {step}, differs in {few(changes)}. "
            "Use its values to go on with it, resume=never to move it aside and start over, or another name=."
        )
    sentence = f"Going on with the unfinished run in {folder} (resume=never starts over)."
    return Start(last, sentence, step)


def finished(config: Mapping[str, Any], fingerprint: Fingerprint | None = None) -> bool:
    """Return whether the run of this configuration lies in ``config["folder"]``, trained to its end.

    Args:
        config: a composed configuration.
        fingerprint: makes the fingerprint of the data, which is asked for where they lie at another path.

    Raises CheckpointError where a run was finished, but its checkpoint is broken.
    """
    folder = Path(config["folder"])
    last = newest(folder) if _status(folder) == "finished" else None
    if last is None:
        return False
    checkpoint = _read(last, verify=False)
    there, here = _config(checkpoint)["data"], config["data"]
    moved = any(there.get(key) != here.get(key) for key in CONTENTS)
    return not _changes(checkpoint, config, fingerprint if moved else None)


def identity(config: Mapping[str, Any]) -> str:
    """Return SHA-256 of all values that change training: the same for two runs exactly if they train the same."""
    decisive = {key: value for key, value in sorted(flat(config).items()) if decides(key)}
    started = weights.begins(config)
    return hashlib.sha256(json.dumps([decisive, started], default=str).encode()).hexdigest()


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], branches: bool = False, divided: bool = False
) -> list[str]:
    """Return the differences in training: ``data.batch_size (4 there, 8 here)``; empty if two configurations train the
    same.

    A key that the old one does not have yet has the default of its part.

    Args:
        old, new: composed configurations.
        branches: leave out the values that a branch may change.
        divided: leave out how a step is divided among processes.
    """
    first, second = flat(_completed(old, new)), flat(new)
    keys = sorted(first.keys() | second.keys(), key=lambda key: (key.startswith("model."), key))
    return contrast(first, second, (key for key in keys if decides(key, branches, divided)))


def _completed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return an older configuration with the defaults of its parts for keys that were added since."""
    made = dict(old)
    if "_target_" in new and old.get("_target_") == new["_target_"]:
        taken = parameters(new["_target_"]) or {}  # of this configuration: the other one is not trusted to name it
        defaults = {key: _in_yaml(taken[key].default) for key in new.keys() - old.keys() if key in taken}
        made |= {key: value for key, value in defaults.items() if value is not Parameter.empty}
    both = {key: (made[key], value) for key, value in new.items() if isinstance(made.get(key), Mapping)}
    return made | {key: _completed(first, two) for key, (first, two) in both.items() if isinstance(two, Mapping)}


def _in_yaml(default: Any) -> Any:
    """Return the default of an argument as a yaml has it: a part of this project by the path of its class."""
    kind = type(default)
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}"} if kind.__module__.startswith("gsm.") else default


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process, if the disk has locks. Raises ConfigError where another one trains there.

    A folder that was not there before is removed again where an error leaves it empty.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    _make(folder)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"training cannot start because another process is training in {folder}. Use another seed=, arm= or "
                "name=."
            ) from error
        except OSError as error:  # some network file systems have no locks
            warning = f"{folder} cannot be locked ({error.strerror}): a second process in it is not noticed"
            print(warning, file=sys.stderr, flush=True)
        try:
            yield
        except BaseException:
            if made and {path.name for path in folder.iterdir()} == {".lock"}:
                (folder / ".lock").unlink()
                with contextlib.suppress(OSError):  # another run has a folder beside it
                    for path in made:
                        path.rmdir()
            raise


def note(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration and the overrides of the command line to ``.hydra``; nothing in a call from Python."""
    if command_line.prepared:
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        values = {key: value for key, value in config.items() if key not in ("choices", "overrides")}
        for name, content in (("config", values), ("overrides", config["overrides"])):
            OmegaConf.save(OmegaConf.create(content), folder / f".hydra/{name}.yaml")


def _make(folder: Path) -> None:
    """Make the folder of a run, and those above it. Raises ConfigError where no disk has such a place, OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"folder={folder} is not allowed because it cannot be made. Use another folder= or logs=."
        ) from error


def _status(folder: Path) -> str | None:
    """Return how the last run in this folder ended; None: unknown."""
    return (read_json(folder / "summary.json") or {}).get("status")


def _changes(
    checkpoint: Mapping[str, Any], config: Mapping[str, Any], fingerprint: Fingerprint | None = None
) -> list[str]:
    """Return the differences between the run of the folder and this configuration, data and start.

    The steps of an unfinished run may be divided otherwise; for a finished one it counts how it was measured.
    """
    before, config = _config(checkpoint), _at_its_paths(checkpoint, config, fingerprint)
    if _status(Path(config["folder"])) == "finished":
        changes = differences(before, config)
        if before["trainer"].get(MEASURED) != config["trainer"].get(MEASURED):
            changes.append(f"trainer.{MEASURED}")
    else:
        changes = _trained_otherwise(checkpoint, config)
    changes += _other_weights(checkpoint, config)
    return changes or _other_data(checkpoint, fingerprint)


def _trained_otherwise(checkpoint: Mapping[str, Any], config: Mapping[str, Any], branches: bool = False) -> list[str]:
    """Return the differences from an earlier training; a step may be divided otherwise."""
    theirs = _config(checkpoint)
    return differences(theirs, config, branches, divided=theirs["global_batch"] == config["global_batch"])


def _at_its_paths(
    checkpoint: Mapping[str, Any], config: Mapping[str, Any], fingerprint: Fingerprint | None
) -> Mapping[str, Any]:
    """Return the configuration with the checkpoint's paths of data, where the same lies at both."""
    before, there, here = checkpoint.get("fingerprint") or {}, _config(checkpoint)["data"], config["data"]
    keys = [key for key, name in CONTENTS.items() if name in before and there.get(key) != here.get(key)]
    now = fingerprint() if keys and fingerprint else {}
    same = {key: there.get(key) for key in keys if before[CONTENTS[key]] == now.get(CONTENTS[key])}
    return {**config, "data": {**here, **same}}


def _over(config: Mapping[str, Any], fingerprint: Fingerprint | None) -> Start:
    """Start from nothing, or as a branch from its checkpoint. Raises ConfigError for files that are not a run's."""
    path = checkpoint_folder(config["start_from"]) if config.get("start_from") else None
    start = _branch(path, config, fingerprint) if path and weights.is_branch(config) else Start()
    return _making_room(start, Path(config["folder"]), path)


def _making_room(start: Start, folder: Path, source: Path | None) -> Start:
    """Return the start with a note of whether files have to move. Raises ConfigError for files that are not a run's,
    or if the checkpoint to start from, ``source``, is among them."""
    names = {path.name for path in _contents(folder)} - {".hydra"}  # the notes of a start that Lightning refused
    foreign = sorted(name for name in names if not LEFT.fullmatch(name))
    if foreign and not names & MARKS:
        raise ConfigError(
            f"folder={folder} is not allowed because it holds {few(foreign)}, which no run has written. Use an empty "
            "folder=."
        )
    if names and source and folder.resolve() in source.resolve().parents:
        raise ConfigError(
            f"start_from={source} is not allowed because it lies in the folder of the new run, whose files make room. "
            "Use another name= or arm=."
        )
    return replace(start, moves=bool(names))


def _branch(path: Path, config: Mapping[str, Any], fingerprint: Fingerprint | None) -> Start:
    """Start with everything in a checkpoint. Raises CheckpointError where it is of another training."""
    checkpoint, remedy = _read(path), "start_fresh=true to take the weights alone"
    config = _at_its_paths(checkpoint, config, fingerprint)
    changes = _trained_otherwise(checkpoint, config, branches=True) or _other_data(checkpoint, fingerprint)
    if changes:
        raise CheckpointError(
            f"{path} cannot go on with this configuration: it differs in {few(changes)}. Use its values, or {remedy}."
        )
    step, steps = checkpoint["global_step"], config["trainer"]["max_steps"]
    if step > steps:
        raise CheckpointError(
            f"trainer.max_steps={steps} is not allowed because {path} is of step {step} already. Use {step} or "
            f"more, or {remedy}."
        )
    return Start(path, f"Going on from {path}, step {step}.", step, remedy=f"another start_from=, or {remedy}")


def _read(path: Path, verify: bool = True) -> dict[str, Any]:
    """Return the facts of a checkpoint to go on from. Raises CheckpointError for one that no training goes on from."""
    checkpoint = read_checkpoint(path, weights=False)
    if STATE not in checkpoint:
        raise CheckpointError(f"training cannot go on from {path}: it is a model alone")
    if verify:
        check(path)
    return checkpoint


def _read_last(last: Path) -> dict[str, Any]:
    """Return the last step; where it is broken, the error names the remedies."""
    try:
        return _read(last)
    except (CheckpointError, FileNotFoundError) as error:
        remedy = "resume=never starts over"
        before = [step for step in steps(last.parent.parent) if step != last]
        if before:
            remedy = f"without the folder {last} the run goes on from {before[-1].name}, {remedy}"
        raise CheckpointError(f"{error}; {remedy}") from error


def _config(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of its run."""
    return checkpoint["hyper_parameters"]["config"]


def _other_data(checkpoint: Mapping[str, Any], fingerprint: Fingerprint | None) -> list[str]:
    """Return the differences between the checkpoint's data and these; an older checkpoint has no fingerprint."""
    before = checkpoint.get("fingerprint")
    return unlike(before, fingerprint()) if before and fingerprint else []


def _other_weights(checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the weights that a run started from, and would start from now, where their contents differ."""
    before, now = checkpoint.get("started_from"), weights.begins(config)
    names = [shortened(digest) if digest else "fresh ones" for digest in (before, now)]
    return [] if before == now else [f"the weights it starts from ({names[0]} there, {names[1]} here)"]


def make_room(config: Mapping[str, Any]) -> Path:
    """Move the files of an earlier run to ``<logs>/.replaced/<name>/<arm>/seed<k>-<n>``, and return that folder.

    Checkpoints go first and the summary last: an interrupted move leaves a folder that is ours and not finished. The
    output of the command that starts there stays.
    """
    folder = Path(config["folder"])
    parent = Path(config["logs"]) / ".replaced" / str(config["name"]) / str(config["arm"])
    taken = {path.name for path in parent.glob("*")} if parent.is_dir() else set()
    target = next(parent / name for n in range(1, len(taken) + 2) if (name := f"{folder.name}-{n}") not in taken)
    target.mkdir(parents=True)
    for path in sorted(_contents(folder), key=lambda path: (path.name == "summary.json", path.name != "checkpoints")):
        shutil.move(path, target / path.name)
    return target


@contextlib.contextmanager
def moving_back(folder: Path, moved: Path) -> Iterator[None]:
    """Move an earlier run back into its folder where a new run is refused before it has left a result there."""
    try:
        yield
    except ConfigError:
        left = _contents(folder)
        if not {path.name for path in left} & {"checkpoints", "metrics.csv"}:
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in moved.iterdir():
                shutil.move(path, folder / path.name)
            moved.rmdir()
            print(f"The earlier run was moved back to {folder}.", flush=True)
        raise


def _contents(folder: Path) -> list[Path]:
    """Return the files of a run's folder, without its lock and the output of the command that starts there."""
    return [path for path in folder.iterdir() if path.name != ".lock" and path.suffix != ".log"]
