"""The checkpoints that a measure is taken of: which files, with what model, in which arithmetic, on which device."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.load import checkpoint_file, load_model, read_checkpoint, refusals, tokenizer_of, usable
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation.results import Progress
from gsm.experiments import weights
from gsm.experiments.trainers import best_precision
from gsm.files import read_json
from gsm.models.base import LanguageModel
from gsm.training.callbacks.progress import clock

TRAINED = "trained"  # in a summary: those of several runs, one after another, that train


@dataclass(frozen=True)
class Trained:
    """A checkpoint that is measured; what is read of it is read when it is wanted.

    Attributes:
        file: the checkpoint.
        device: where the model goes.
        note: which of several it is, for progress.
    """

    file: Path
    device: str
    note: str = ""

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The checkpoint, its tensors left on the disk."""
        return read_checkpoint(self.file, mmap=True)

    @cached_property
    def model(self) -> LanguageModel:
        """The model, in evaluation mode."""
        return load_model(self.file, self.device)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of its run."""
        return self.saved["hyper_parameters"]["config"]

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises CheckpointError if it has none."""
        return tokenizer_of(self.saved, self.file)

    @property
    def run(self) -> dict[str, Any]:
        """``experiment``, ``arm`` and ``seed``."""
        config = self.config
        return {"experiment": config.get("name"), "arm": str(config.get("arm")), "seed": config.get("seed")}

    @property
    def step(self) -> int | None:
        """Optimiser steps that it has taken."""
        return self.saved.get("global_step")

    @property
    def facts(self) -> dict[str, Any]:
        """What every result begins with."""
        return {"checkpoint": str(self.file), **self.run, "step": self.step}

    @property
    def digest(self) -> str | None:
        """What the content of the file is known by."""
        return weights.digest(self.file)

    @property
    def precision(self) -> str:
        """The arithmetic that the run validated in; on a CPU float32, and on a GPU what ``auto`` would choose there."""
        chosen = str(self.config.get("trainer", {}).get("precision") or "32-true")
        return best_precision(torch.device(self.device).type) if chosen == "auto" else chosen

    @property
    def device_name(self) -> str:
        """What a result says of where it was measured."""
        if torch.device(self.device).type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device}, {torch.get_num_threads()} threads"

    @property
    def device_kind(self) -> str:
        """The same without the number of threads, which no resumed measure depends on."""
        return self.device_name.partition(",")[0]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Computes in its precision; what is refused becomes a ConfigError that names the file."""
        kinds = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        kind = kinds.get(self.precision)
        cast = torch.autocast(torch.device(self.device).type, dtype=kind) if kind else contextlib.nullcontext()
        with cast, refusals(str(self.file)):
            yield

    def progress(self, unit: str, of: str = "") -> Progress:
        """Says how far this checkpoint is, in these units, and with what."""
        return lambda parts, count, note="": progress(parts, count, f"{self.note}{of}{note}", unit)


def opened(files: Sequence[Path], device: str) -> Iterator[Trained]:
    """One checkpoint after another, so that one model at a time is in memory."""
    device = usable(device)
    for number, file in enumerate(files, 1):
        yield Trained(file, device, f"{number} of {len(files)}: " if len(files) > 1 else "")


def checkpoints(path: str) -> list[Path]:
    """The checkpoint at a path or of a name, as ``load_model`` finds it, or those of all runs below it, sorted; of runs
    after one another, that of the last.

    Raises FileNotFoundError if there is none.
    """
    folder = Path(path)
    if not folder.is_dir() or checkpoint_file(folder).is_file():
        return [checkpoint_file(folder) if folder.is_dir() or path in paths.trained() else folder]
    found = sorted(folder.glob("**/checkpoints/last.ckpt"))
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    found = [file for file in found if _is_last(file)]
    if not found:
        raise FileNotFoundError(f"no checkpoint at {path}, and no run below it has a checkpoints/last.ckpt")
    return found


def _is_last(file: Path) -> bool:
    """Whether a checkpoint is of a single run, or of the last one of those after one another that have one."""
    phase, run = file.parent.parent.name, file.parent.parent.parent
    trained = (read_json(run / "summary.json") or {}).get(TRAINED)
    if not isinstance(trained, list):
        return True
    there = [name for name in trained if (run / name / "checkpoints" / "last.ckpt").is_file()]
    return phase in there[-1:]


def home(file: Path) -> Path:
    """The folder of a checkpoint's run; of one that comes with the package, where what is measured of it may lie."""
    if file.resolve() in {one.resolve() for one in paths.trained().values()}:
        return Path("logs") / "trained" / file.stem
    return file.parent.parent if file.parent.name == "checkpoints" else file.parent


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """What cannot be written becomes a ConfigError that says what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{place} cannot be written ({error.strerror}); say output=, a place elsewhere") from error


def progress(
    parts: Iterable[Any], count: int, note: str = "", unit: str = "sequences", patience: float = 3.0
) -> Iterator[Any]:
    """Passes parts on, and says on stderr how far it is, when that takes longer than ``patience`` seconds."""
    start = last = time.perf_counter()
    terminal, written = sys.stderr.isatty(), False
    for done, part in enumerate(parts):
        now = time.perf_counter()
        if done and now - last > (patience if terminal or not written else 30.0):
            left = clock((now - start) / done * (count - done))
            line = f"{note}{done} of {count} {unit}, {left} left"
            sys.stderr.write(f"\r{line:<78}" if terminal else f"{line}\n")
            sys.stderr.flush()
            last, written, patience = now, True, min(patience, 0.5)
        yield part
    if written and terminal:
        sys.stderr.write(f"\r{'':<78}\r")
