"""Find runs and checkpoints on the disk by a path or a name."""

from __future__ import annotations

import glob
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from gsm import checkpoint, paths
from gsm.checkpoint import CheckpointError
from gsm.config import address
from gsm.errors import ConfigError
from gsm.files import read_json


def read_checkpoint(path: str | os.PathLike[str], weights: bool = True) -> dict[str, Any]:
    """Read a checkpoint of this project as plain containers and tensors on the CPU; no code from it runs.

    Args:
        path: of a step's folder, of a run (its last step), or of a model; or the name of a packaged one.
        weights: read the weights, too, as ``state_dict``, and compare files with their checksums; otherwise the facts
            alone: ``hyper_parameters`` with the configuration, ``global_step``, ``tokenizer``, ``fingerprint``, ...

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it is incomplete, damaged or no checkpoint of this project.
    """
    folder = checkpoint_folder(path)
    if not (checkpoint.is_model(folder) or (folder / checkpoint.STATE).is_file()):
        raise _missing(folder)
    checkpoint.check(folder, verify=weights)
    facts = {**(checkpoint.read_state(folder) or {}), **checkpoint.read_facts(folder)}
    return {**facts, "state_dict": checkpoint.read_weights(folder)} if weights else facts


def _missing(folder: Path) -> Exception:
    """Return the error for a path without a checkpoint."""
    if folder.is_file():
        return CheckpointError(f"{folder} is a file: a checkpoint is a folder, such as that of a run or of its step")
    if folder.is_dir():
        return FileNotFoundError(f"no checkpoint in {folder}: it has no checkpoints/step_...")
    return FileNotFoundError(f"no checkpoint at {folder}; the package has the models {', '.join(paths.trained())}")


def checkpoint_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a checkpoint.

    The folder of a step, and one with a model alone, stand for themselves, and that of a run for its last step. The
    address at the end of a run's folder may be left out; of several such runs it is the one that was finished, else
    started, last. Any other name is that of a model in the package (``gsm.paths.trained``).
    """
    folder = Path(paths.at_home(os.fspath(path)))
    if not folder.exists() and str(path) in paths.trained():
        return paths.trained()[str(path)]
    if not folder.exists() and (runs := named(folder)):
        if len({_arm(run) for run in runs}) > 1:
            raise ConfigError(f"{path} must name runs of one arm and seed, got {', '.join(run.name for run in runs)}")
        folder = max(runs, key=lambda run: (is_finished(run), started(run)))
        if len(runs) > 1:
            print(f"{path} is {folder.name}, the newest of {len(runs)} runs", file=sys.stderr, flush=True)
    return folder if checkpoint.is_model(folder) else checkpoint.newest(folder) or folder


def named(path: Path) -> list[Path]:
    """Return the folders of the runs whose names begin with these words: of ``logs/default/gsm-seed1`` those of
    ``gsm-seed1-1f3a9c07`` and ``gsm-seed1-extend-77ab03e1``, and not that of ``gsm-seed10-...``."""
    beside = path.parent.glob(f"{glob.escape(path.name)}-*") if path.name else ()
    return sorted(run for run in beside if (run / "summary.json").is_file())


def newest_of_seeds(path: str | os.PathLike[str]) -> list[Path]:
    """Return the newest run of every seed, where a path is the name of an arm without its seed; else none."""
    folder = Path(paths.at_home(os.fspath(path)))
    runs = [] if folder.exists() else named(folder)
    if len({_arm(run)[0] for run in runs}) > 1:
        return []
    newest = {_arm(run)[1]: run for run in sorted(runs, key=lambda run: (is_finished(run), started(run)))}
    return [newest[seed] for seed in sorted(newest)]


def _arm(run: Path) -> tuple[Any, Any]:
    """Return the arm and the seed of the run in a folder."""
    summary = _summary(run)
    return summary.get("arm"), summary.get("seed")


def is_finished(run: Path) -> bool:
    """Return whether the run in a folder is trained to its end and measured, and its last step is there."""
    last, summary = checkpoint.newest(run), _summary(run)
    return summary.get("status") == "finished" and last is not None and checkpoint.step_of(last) == summary.get("steps")


def started(run: Path) -> str:
    """Return the time at which the run in a folder began, as its record has it."""
    return str(_summary(run).get("started") or "")


def _summary(run: Path) -> dict[str, Any]:
    return read_json(run / "summary.json") or {}


def origin(path: str) -> tuple[str, dict[str, Any]]:
    """Return the folder that ``start_from`` names, and what identifies its weights.

    For a run these are its address, the address of its settings without the seed, and the step (None: its end); for a
    model without a run, the digest of its weights.

    Raises ConfigError where several runs have the name, and as ``read_checkpoint`` does.
    """
    place = Path(paths.at_home(path))
    runs = [] if place.exists() else named(place)
    if len(runs) > 1:
        raise ConfigError(f"start_from must name one run, got {path}: {', '.join(run.name for run in runs)}")
    place = runs[0] if runs else place
    step = checkpoint_folder(place)
    facts = read_checkpoint(step, weights=False)
    config, run = facts["hyper_parameters"]["config"], step.parent.parent
    if "address" not in config or checkpoint.read_state(step) is None:
        return str(place), {"weights": str(digest(step))[:16]}
    end = is_finished(run) and checkpoint.newest(run) == step
    try:
        return str(place), address.origin(config, None if end else facts["global_step"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"address in {step / checkpoint.CONFIG} must be that of a run, got {error!r}") from error


def digest(path: str | os.PathLike[str] | None) -> str | None:
    """Return the identity of a checkpoint's weights, the same in any place; None for None.

    SHA-256 of the checksums of its files with weights.

    Raises:
        FileNotFoundError, CheckpointError: as ``read_checkpoint`` does.
    """
    if path is None:
        return None
    folder = checkpoint_folder(path)
    read_checkpoint(folder, weights=False)
    known = (checkpoint.read_state(folder) or {}).get("files") or {}
    files = checkpoint.tensor_files(folder)
    parts = [known.get(file.name) or checkpoint.checksum(file) for file in files]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
