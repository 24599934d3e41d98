"""The checkpoints of a measure: their files, models, arithmetic and device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from gsm import checkpoint, paths
from gsm.config.address import TUNING, address
from gsm.config.check import ConfigError
from gsm.config.load import load_model, refusals, tokenizer_of, usable
from gsm.config.stored import checkpoint_folder, digest, newest_of_seeds, read_checkpoint
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation.divided import Ranks
from gsm.evaluation.records import Measured, Progress
from gsm.models.base import LanguageModel
from gsm.training.callbacks.summary import versions
from gsm.training.distributed.ranks import rank
from gsm.training.trainer import best_precision


@dataclass(frozen=True)
class Trained:
    """A checkpoint that is measured. Its parts are read when they are first used.

    Attributes:
        file: the checkpoint.
        device: the device of the model.
        note: its number among several, for progress.
        ranks: that measure it together.
    """

    file: Path
    device: str
    note: str = ""
    ranks: Ranks = Ranks()

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The checkpoint, its tensors left on the disk."""
        return read_checkpoint(self.file, weights=False)

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
        """The first facts of every result."""
        return {"checkpoint": str(self.file), **self.run, "step": self.step}

    @property
    def digest(self) -> str | None:
        """The identity of the file's content."""
        return digest(self.file)

    def measured(self, file: Path | None, questions: Mapping[str, Any], **model: Any) -> Measured:
        """Return the beginning of a measure: these questions to this checkpoint.

        Args:
            file: of the records.
            questions: what runs side by side have in common.
            model: further settings in which they may differ.
        """
        model |= {"checkpoint": self.digest, "precision": self.precision, "device": self.device_kind}
        settings = {"model": {**model, "versions": versions()}, "questions": questions}
        return Measured.begun(file if self.ranks.rank == 0 else None, settings, self.facts, self.ranks)

    @property
    def precision(self) -> str:
        """The arithmetic of the run's validation: float32 on a CPU; for ``auto`` the choice for this device."""
        chosen = str(self.config.get("trainer", {}).get("precision") or "32-true")
        return best_precision(torch.device(self.device).type) if chosen == "auto" else chosen

    @property
    def device_name(self) -> str:
        """The name of the device in a result."""
        if torch.device(self.device).type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device}, {torch.get_num_threads()} threads"

    @property
    def device_kind(self) -> str:
        """The same without the number of threads: a resumed measure does not depend on it."""
        return self.device_name.partition(",")[0]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Compute in its precision inside the block; a ValueError becomes a ConfigError that names the file."""
        kinds = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        kind = kinds.get(self.precision)
        cast = torch.autocast(torch.device(self.device).type, dtype=kind) if kind else contextlib.nullcontext()
        with cast, refusals(str(self.file)):
            yield

    def progress(self, unit: str, of: str = "") -> Progress:
        """Return a function that reports the progress of this checkpoint in these units."""
        return lambda parts, count, note="": progress(parts, count, f"{self.note}{of}{note}", unit)


def opened(files: Sequence[Path], device: str, ranks: Ranks) -> Iterator[Trained]:
    """Yield one checkpoint after another, so that one model at a time is in memory."""
    device = usable(device)
    for number, file in enumerate(files, 1):
        yield Trained(file, device, f"{number} of {len(files)}: " if len(files) > 1 else "", ranks)


def checkpoints(path: str) -> list[Path]:
    """Return the checkpoints that a path or a name stands for, as ``load_model`` takes it.

    The name of an arm without its seed stands for the newest run of every seed. A folder above runs stands for the last
    step of each run below it, sorted, without runs that another one starts from and without attempts of tuning.

    Raises FileNotFoundError if there is none.
    """
    if len(of_seeds := newest_of_seeds(path)) > 1:
        return [step for run in of_seeds if (step := checkpoint.newest(run))]
    folder = checkpoint_folder(path)
    if not folder.is_dir() or checkpoint.is_model(folder):
        return [folder]
    runs = sorted({file.parent.parent.parent for file in folder.glob(f"**/checkpoints/step_*/{checkpoint.STATE}")})
    runs = [run for run in runs if TUNING not in run.relative_to(folder).parts]
    last = {run: step for run in runs if (step := checkpoint.newest(run))}
    configs = [read_checkpoint(step, weights=False)["hyper_parameters"]["config"] for step in last.values()]
    begun = {config["origin"]["run"] for config in configs if "run" in (config.get("origin") or {})}
    found = [step for step, config in zip(last.values(), configs, strict=True) if address(config) not in begun]
    if not found:
        raise FileNotFoundError(
            f"no checkpoint in {path}, and none of a run below it: give the folder of a run, such as "
            "logs/default/gsm-seed0, or nano"
        )
    return found


def home(folder: Path) -> Path:
    """Return the folder of a checkpoint's run; for a model of the package, a folder below ``logs`` for its results."""
    if folder.resolve() in {path.resolve() for path in paths.trained().values()}:
        return Path("logs") / "trained" / folder.name
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a ConfigError with the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{place} cannot be written ({error.strerror}). Use output= for another place.") from error


def progress(parts: Iterable[Any], count: int, note: str = "", unit: str = "sequences") -> Iterable[Any]:
    """Return the parts, with a bar of progress on stderr if they take longer than three seconds.

    A log has a bar every 30 seconds.
    """
    seconds = 0.1 if sys.stderr.isatty() else 30
    return tqdm(parts, note, count, leave=False, unit=f" {unit}", delay=3, mininterval=seconds, disable=rank() > 0)
