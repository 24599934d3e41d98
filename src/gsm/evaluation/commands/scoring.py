"""What all commands that score checkpoints share: which files, in which arithmetic, on which device, how far it is."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gsm.config.check import ConfigError
from gsm.experiments.trainers import best_precision
from gsm.files import read_json
from gsm.training.callbacks.progress import clock

TRAINED = "trained"  # in a summary: those of several runs, one after another, that train


def checkpoints(path: str) -> list[Path]:
    """The checkpoint at a path, or those of all runs below it, sorted; of runs after one another, that of the last.

    Raises FileNotFoundError if there is none.
    """
    folder = Path(path)
    if not folder.is_dir() or (folder / "checkpoints" / "last.ckpt").is_file():
        return [folder / "checkpoints" / "last.ckpt" if folder.is_dir() else folder]
    found = sorted(folder.glob("**/checkpoints/last.ckpt"))
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    found = [file for file in found if _is_last(file)]
    if not found:
        raise FileNotFoundError(f"no checkpoint at {path}, and no run below it has a checkpoints/last.ckpt")
    return found


def _is_last(file: Path) -> bool:
    """Whether a checkpoint is of a single run, or of the last one of those after one another that have one."""
    name, run = file.parent.parent.name, file.parent.parent.parent
    trained = (read_json(run / "summary.json") or {}).get(TRAINED)
    if not isinstance(trained, list):
        return True
    there = [one for one in trained if (run / one / "checkpoints" / "last.ckpt").is_file()]
    return name in there[-1:]


def read_masks(text: str, *, both: bool = True) -> list[str]:
    """``on``, ``off``, or, where that is allowed, ``both``; in a yaml the first two are true and false.

    Raises ConfigError for anything else.
    """
    known = {"on": ["on"], "true": ["on"], "off": ["off"], "false": ["off"]}
    known |= {"both": ["off", "on"]} if both else {}
    if text not in known:
        raise ConfigError(f"masks is '{text}', but has to be on, off{' or both' if both else ''}: of documents")
    return known[text]


def progress(
    sequences: Iterable[Any], count: int, note: str = "", unit: str = "sequences", patience: float = 3.0
) -> Iterator[Any]:
    """Passes sequences on, and says on stderr how far it is, when that takes longer than ``patience`` seconds."""
    start = last = time.perf_counter()
    terminal, written = sys.stderr.isatty(), False
    for done, sequence in enumerate(sequences):
        now = time.perf_counter()
        if done and now - last > (patience if terminal or not written else 30.0):
            left = clock((now - start) / done * (count - done))
            line = f"{note}{done} of {count} {unit}, {left} left"
            sys.stderr.write(f"\r{line:<78}" if terminal else f"{line}\n")
            sys.stderr.flush()
            last, written, patience = now, True, min(patience, 0.5)
        yield sequence
    if written and terminal:
        sys.stderr.write(f"\r{'':<78}\r")


def precision_of(config: Mapping[str, Any], device: str) -> str:
    """The arithmetic that the run validated in; on a CPU float32, and on a GPU what ``auto`` would choose there."""
    chosen = str(config.get("trainer", {}).get("precision") or "32-true")
    return best_precision(torch.device(device).type) if chosen == "auto" else chosen


def autocast(precision: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """The context that a model computes in: of a precision as Lightning names it."""
    kinds: dict[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    if precision not in kinds:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=kinds[precision])


def device_name(device: str) -> str:
    """What a result says of where it was measured."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads"


def home(file: Path) -> Path:
    """The folder of a checkpoint's run."""
    return file.parent.parent if file.parent.name == "checkpoints" else file.parent
