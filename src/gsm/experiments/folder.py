"""The folder of a run: one process at a time, what lies there already, and where training goes on from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import Any

from gsm.config.check import ConfigError, contrast, few, flat, parameters
from gsm.config.decisive import ENDING, WATCHING, decides
from gsm.config.load import LAST, CheckpointError, checkpoint_file, instantiate, read_checkpoint
from gsm.experiments import weights
from gsm.files import read_json, sweep
from gsm.training.distributed import shards
from gsm.training.resume import STATE

OWN = {".hydra", ".lock"}  # written for the new run before it looks at the folder
MARKS = {"summary.json", "checkpoints"}  # one of them lies in the folder of every run that has begun
LEFT = re.compile(r"events\.out\..*|hparams\.yaml|metrics\.csv|\..*\.partial")  # what one cut off earlier may leave
MEASURED = "limit_val_batches"  # trains nothing, but a finished run's numbers are of it
# Of the data, which is made only where there is something to compare.
Fingerprint = Callable[[], Mapping[str, str | int]]


@dataclass(frozen=True)
class Start:
    """Where a run starts: from a checkpoint, or from nothing; and a sentence about it (empty: nothing to tell).

    What was logged after ``step`` does not count any more.

    Attributes:
        origin: the checkpoint outside of this run that it once began with, None if it began with nothing.
        finished: this very run lies there, trained to its end, and nothing is left to do.
    """

    checkpoint: Path | None = None
    sentence: str = ""
    step: int = 0
    origin: str | None = None
    finished: bool = False


def prepare(
    config: Mapping[str, Any], leads: bool = True, fingerprint: Fingerprint | None = None, world: int = 1
) -> Start:
    """Decides, by ``config["resume"]``, whether to go on or to start over; no run is ever deleted.

    * ``auto``: an unfinished run goes on from its last checkpoint, if it is of the same configuration and data; ranks
      and their batches may be others if as many sequences make up a step. A finished one is left as it is;
    * ``never`` (or ``force``): start over; a branch (``start_fresh=false``) at the checkpoint that it leaves;
    * a path: go on from that checkpoint, if the configuration trains the same model on the same data in the same way;
      a run that has begun there already goes on where it is, or is left as it is.

    A run that starts over in a used folder moves what lies there to ``<logs>/.replaced/<name>/<arm>/seed<k>-<n>``; of
    several processes that train together, the one that ``leads`` does.

    Args:
        config: a composed configuration.
        leads: whether this process may move and remove files.
        fingerprint: makes what the data that is here is known by; None: do not compare.
        world: ranks that are to train.

    Raises:
        CheckpointError: the checkpoint to go on from cannot be read, or is of another configuration or other data.
        ConfigError: the folder holds files that are no run's.
        OSError: the folder cannot be written to.
    """
    folder, resume = Path(config["folder"]), str(config["resume"])
    _make(folder)
    if leads:
        sweep(folder, folder / "checkpoints")
        shards.sweep(folder / "checkpoints")
    last = folder / LAST
    if resume not in ("auto", "never"):
        path = checkpoint_file(resume).resolve()
        checkpoint, began, changes = _began_with(path, config, fingerprint, world), f", which began with {path}", []
        if checkpoint is None:
            return _from_path(path, config, leads, fingerprint, world)
    elif resume == "never" or config.get("force") or not last.is_file():
        return _over(config, leads, fingerprint, world)
    else:
        checkpoint, began = _read_last(last), ""
        changes = _changes(checkpoint, config, fingerprint, world)
    step = checkpoint["global_step"]
    if _status(folder) == "finished":
        if changes:
            return _over(config, leads, fingerprint, world, _why_over(changes, step))
        return Start(sentence=f"The run in {folder} is finished already (resume=never trains it again).", finished=True)
    if changes:
        raise CheckpointError(
            f"the unfinished run in {folder}, at step {step}, differs in {few(changes)}: give what it had to go on "
            "with it, resume=never to move it aside and start over, or another name="
        )
    sentence = f"Going on with the unfinished run in {folder}{began} (resume=never starts over)."
    return Start(last, sentence, step, checkpoint.get("origin"))


def finished(config: Mapping[str, Any]) -> bool:
    """Whether the run of this configuration lies in ``config["folder"]``, trained to its end.

    Raises CheckpointError where a run was finished, but its checkpoint is broken.
    """
    folder = Path(config["folder"])
    if _status(folder) != "finished" or not (folder / LAST).is_file():
        return False
    return not _changes(_read(folder / LAST, verify=False), config)


def identity(config: Mapping[str, Any]) -> str:
    """SHA-256 of all that decides what a configuration trains: the same for runs between which nothing differs."""
    decisive = {key: value for key, value in sorted(flat(config).items()) if decides(key)}
    started = weights.begins(config)
    return hashlib.sha256(json.dumps([decisive, started], default=str).encode()).hexdigest()


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], by_path: bool = False, divided: bool = False
) -> list[str]:
    """What two configurations train differently: ``data.batch_size (4 there, 8 here)``; empty if they train the same.

    A key that the old one does not have yet is what its part takes by default.

    Args:
        old, new: composed configurations.
        by_path: compare only what a checkpoint cannot do without.
        divided: leave out how a step is divided among processes.
    """
    first, second = flat(_completed(old, new)), flat(new)
    keys = sorted(first.keys() | second.keys(), key=lambda key: (key.startswith("model."), key))
    return contrast(first, second, (key for key in keys if decides(key, by_path, divided)))


def _completed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """An older configuration with what its parts took by default for keys that were added since."""
    made = dict(old)
    if "_target_" in new and old.get("_target_") == new["_target_"]:
        taken = parameters(new["_target_"]) or {}  # of this configuration: the other one is not trusted to name it
        defaults = {key: taken[key].default for key in new.keys() - old.keys() if key in taken}
        made |= {key: value for key, value in defaults.items() if value is not Parameter.empty}
    both = {key: (old[key], value) for key, value in new.items() if isinstance(old.get(key), Mapping)}
    return made | {key: _completed(one, two) for key, (one, two) in both.items() if isinstance(two, Mapping)}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process. Raises ConfigError where another one is training there."""
    _make(folder)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is training in {folder}: choose another seed=, arm= or name="
            ) from error
        yield


def _make(folder: Path) -> None:
    """Makes the folder of a run, and those above it. Raises ConfigError where no disk has such a place, OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise ConfigError(f"folder {folder} cannot be made: choose another folder= or logs=") from error


def _status(folder: Path) -> str | None:
    """How the last run in this folder ended; None if it did not say."""
    return (read_json(folder / "summary.json") or {}).get("status")


def _changes(
    checkpoint: Mapping[str, Any], config: Mapping[str, Any], fingerprint: Fingerprint | None = None, world: int = 1
) -> list[str]:
    """What the run of the folder differs in from one of this configuration, on this data and from these weights.

    Before it is finished, its steps may be divided otherwise; once it is, it counts how its numbers were measured.
    """
    before = _config(checkpoint)
    if _status(Path(config["folder"])) == "finished":
        changes = differences(before, config)
        if before["trainer"].get(MEASURED) != config["trainer"].get(MEASURED):
            changes.append(f"trainer.{MEASURED}")
    else:
        changes = _trained_otherwise(checkpoint, config, world)
    return changes + _other_weights(checkpoint, config) or _other_data(checkpoint, fingerprint)


def _trained_otherwise(
    checkpoint: Mapping[str, Any], config: Mapping[str, Any], world: int, by_path: bool = False
) -> list[str]:
    """What would be trained otherwise than before on so many ranks; how a step is divided among them is free."""
    theirs, before = _config(checkpoint), checkpoint[STATE]["world"]
    there, here = sequences_a_step(theirs, before), sequences_a_step(config, world)
    ranks = "" if before == world else f", shared out among {before} and {world}"
    steps = [] if there == here else [f"sequences a step ({there} there, {here} here{ranks})"]
    return steps + differences(theirs, config, by_path, divided=there == here)


def _began_with(
    path: Path, config: Mapping[str, Any], fingerprint: Fingerprint | None, world: int
) -> dict[str, Any] | None:
    """The checkpoint of the folder's own run, if that once began with the one at ``path``: given again, a command does
    not undo it."""
    last = Path(config["folder"]) / LAST
    if last.is_file() and path != last.resolve():
        with contextlib.suppress(CheckpointError):  # the one that was asked for may be sound
            checkpoint = _read(last)
            if checkpoint.get("origin") == str(path) and not _changes(checkpoint, config, fingerprint, world):
                return checkpoint
    return None


def _from_path(
    path: Path, config: Mapping[str, Any], leads: bool, fingerprint: Fingerprint | None, world: int
) -> Start:
    """Goes on from a checkpoint of this or another folder. Raises CheckpointError where it does not fit."""
    start = _going_on(path, config, fingerprint, world, "resume=never to start over")
    sentence = start.sentence
    if leads and Path(config["folder"]).resolve() not in path.parents:
        moved = _move_aside(Path(config["folder"]), config)
        sentence += f" An earlier run in this folder was moved to {moved}." if moved else ""
    return replace(start, sentence=sentence, origin=str(path))


def _over(
    config: Mapping[str, Any], leads: bool, fingerprint: Fingerprint | None, world: int, reason: str = ""
) -> Start:
    """From nothing, or a branch from what it leaves; what lies in the folder moves away."""
    start = Start()
    if weights.is_branch(config):
        path = checkpoint_file(config["start_from"])
        start = _going_on(path, config, fingerprint, world, "start_fresh=true to take the weights alone")
    moved = _move_aside(Path(config["folder"]), config) if leads else None
    told = f"An earlier run in this folder was moved to {moved}{reason}." if moved else ""
    return replace(start, sentence=" ".join(filter(None, [told, start.sentence])))


def _going_on(path: Path, config: Mapping[str, Any], fingerprint: Fingerprint | None, world: int, remedy: str) -> Start:
    """With all that a checkpoint holds. Raises CheckpointError where it is of another training."""
    checkpoint = _read(path)
    changes = _trained_otherwise(checkpoint, config, world, by_path=True) or _other_data(checkpoint, fingerprint)
    if changes:
        raise CheckpointError(
            f"{path} cannot go on with this configuration: it differs in {few(changes)}; give what it had, or {remedy}"
        )
    step = checkpoint["global_step"]
    return Start(path, f"Going on from {path}, step {step}.{_jumps(checkpoint, config)}", step)


def sequences_a_step(config: Mapping[str, Any], world: int) -> int | None:
    """How many one step has, on so many ranks; None where the data do not say."""
    batch = config["data"].get("batch_size")
    return config["global_batch"] or (batch and batch * world)


def _jumps(checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What does not go on smoothly in a run of another length than it was begun with, as a sentence."""
    planned, steps = _config(checkpoint)["trainer"]["max_steps"], config["trainer"]["max_steps"]
    if planned == steps:
        return ""
    done = max(0, checkpoint["global_step"] - 1)  # the last step, up to which both may be alike
    rates = _schedule(_config(checkpoint), config)(done, planned), _schedule(config, config)(done, steps)
    follow = ["the learning rate"] if rates[0] != rates[1] else []
    follow += ["the length of sequences"] if config["data"].get("shortest") else []
    own = [name for name, node in (config.get("callbacks") or {}).items() if node and name not in WATCHING]
    follow += [f"callbacks.{name}" for name in own]
    if not follow:
        return ""
    return (
        f" It was to have {planned} steps and is to have {steps}: from here on, what is a function of the part of the "
        f"run that is done jumps to the curve of the new length: {', '.join(follow)}."
    )


def _schedule(ends: Mapping[str, Any], config: Mapping[str, Any]) -> Callable[[int, int], float]:
    """The factor of the learning rate by step and number of steps, of a run that ends as one of these configurations
    says and is as the other one else."""
    ending = {key.removeprefix("optimizer.") for key in ENDING} & ends["optimizer"].keys()
    chosen = {**config["optimizer"], **{key: ends["optimizer"][key] for key in ending}}
    return instantiate(chosen, "optimizer").factor


def _read(path: Path, verify: bool = True) -> dict[str, Any]:
    """A checkpoint to go on from. Raises CheckpointError for one that does not say how it was trained."""
    checkpoint = read_checkpoint(path, mmap=True, verify=verify)
    for part, held, key in (("trainer", _config(checkpoint), "max_steps"), (STATE, checkpoint, "world")):
        if key not in held.get(part, {}):
            raise CheckpointError(f"{path} can be loaded, but not gone on from: its {part}.{key} is missing")
    return checkpoint


def _read_last(last: Path) -> dict[str, Any]:
    """``last.ckpt``; where it is broken, the error says what can be done instead of starting over without a word."""
    try:
        return _read(last)
    except CheckpointError as error:
        remedy = "resume=never starts over"
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            best = last.with_name("best.ckpt")
            step = _read(best)["global_step"]
            remedy = f"resume={best} goes on from step {step}, {remedy}"
        raise CheckpointError(f"{error}; {remedy}") from error


def _config(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of its run."""
    return checkpoint["hyper_parameters"]["config"]


def _other_data(checkpoint: Mapping[str, Any], fingerprint: Fingerprint | None) -> list[str]:
    """What the data that is here differs in from the checkpoint's; an older checkpoint does not say and goes on."""
    before = checkpoint.get("fingerprint")
    return unlike(before, fingerprint()) if before and fingerprint else []


def _other_weights(checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What a run started from, and would start from now, where these are not the same weights, wherever they lie."""
    before, here = checkpoint.get("started_from"), weights.begins(config)
    names = [_short(digest) if digest else "fresh ones" for digest in (before, here)]
    return [] if before == here else [f"the weights it starts from ({names[0]} there, {names[1]} here)"]


def unlike(one: Mapping[str, str | int], two: Mapping[str, str | int]) -> list[str]:
    """What two fingerprints of data differ in: ``the data's tokenizer (1f0c... there, 77ab... here)``."""
    return [
        f"the data's {key} ({_short(one.get(key, 'nothing'))} there, {_short(two.get(key, 'nothing'))} here)"
        for key in sorted(one.keys() | two.keys())
        if one.get(key) != two.get(key)
    ]


def _short(value: str | int) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else str(value)


def _why_over(changes: list[str], step: int) -> str:
    """Why a finished run does not go on, to be put after where it was moved to."""
    if len(changes) == 1 and changes[0].startswith("trainer.max_steps "):
        return (
            f": it is finished, after {step} steps, and one of another length is another run, as the learning rate "
            "depends on it (to prolong it all the same: resume=<its last.ckpt>)"
        )
    return f": it is finished and its configuration differs in {few(changes)}"


def _move_aside(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Moves an earlier run's files out of the way; returns where to, None if there was nothing.

    Checkpoints go first and the summary last: what is cut off on the way is no finished run, and known for one of ours.

    Raises ConfigError for files that are not a run's.
    """
    found = [path for path in folder.iterdir() if path.name not in OWN and path.suffix != ".log"]
    if not found:
        return None
    foreign = sorted(path.name for path in found if not LEFT.fullmatch(path.name))
    if foreign and not any(path.name in MARKS for path in found):
        raise ConfigError(
            f"folder {folder} holds {few(foreign)}, but no run that could be moved aside: choose an empty folder="
        )
    parent = Path(config["logs"]) / ".replaced" / str(config["name"]) / str(config["arm"])
    taken = {path.name for path in parent.glob("*")} if parent.is_dir() else set()
    target = next(parent / name for n in range(1, len(taken) + 2) if (name := f"{folder.name}-{n}") not in taken)
    target.mkdir(parents=True)
    for path in sorted(found, key=lambda path: (path.name == "summary.json", path.name != "checkpoints")):
        shutil.move(path, target / path.name)
    return target
