"""``summary.json``: facts and results of a run, in one file from which tables are made."""

from __future__ import annotations

import contextlib
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning
import torch

from gsm import __version__
from gsm.files import read_json, write_json
from gsm.provenance import commit, sources
from gsm.training.callbacks import find
from gsm.training.callbacks.throughput import Throughput, peak_memory_bytes

VALIDATION = {  # key in the file: metric of a validation
    "val_loss": "val/loss",
    "val_perplexity": "val/perplexity",
    "bits_per_byte": "val/bits_per_byte",
    "accuracy": "val/accuracy",
}


class Summary(lightning.Callback):
    """Write the file when training begins and when it ends: ``status`` is ``running``, ``interrupted`` or ``failed``.

    The run sets ``finished`` (``add``) after its conclusions: a run that is cut off before goes on. ``reason`` says
    whether a callback has ended it before its last step.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.facts: dict[str, Any] = {
            "versions": versions(),
            "commit": commit(),
            "sources": sources(),
            **dict.fromkeys(VALIDATION),
        }

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Replace the file of an earlier part of this run; the time at which it began stays."""
        began = (read_json(self.path) or {}).get("started") or datetime.now(UTC).isoformat(timespec="seconds")
        self.add(trainer, status="running", reason=None, started=began)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write the measurements of training; conclusions come through ``add``, which writes the file once more."""
        self.add(trainer)

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Write the measurements so far and the error. A failure to write is ignored: it must not hide the error."""
        stopped = isinstance(exception, KeyboardInterrupt | SystemExit)  # Ctrl-C; SIGTERM, as Lightning raises it
        reason = None if stopped else f"{type(exception).__name__}: {exception}"
        with contextlib.suppress(OSError):
            self.add(trainer, status="interrupted" if stopped else "failed", reason=reason)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Take the results of the validation; they travel in the checkpoint that is written then."""
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self.facts |= {key: float(metrics[name]) for key, name in VALIDATION.items() if name in metrics}

    def state_dict(self) -> dict[str, Any]:
        """Return the results of the last validation, for a resumed run that has only its conclusions left."""
        return {key: self.facts[key] for key in VALIDATION}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.facts |= state_dict

    def add(self, trainer: lightning.Trainer, **facts: Any) -> dict[str, Any]:
        """Update the measurements, add ``facts``, write the file, and return its content."""
        throughput = next(iter(find(trainer, Throughput)), None)
        self.facts |= {
            "steps": trainer.global_step,
            "tokens": throughput.tokens if throughput else None,
            "tokens_per_second": throughput.tokens_per_second if throughput else None,
            "train_seconds": throughput.seconds if throughput else None,
            "peak_memory_bytes": peak_memory_bytes(trainer.strategy.root_device),
            **facts,
        }
        if trainer.is_global_zero:
            write_json(self.path, self.facts)
        return self.facts


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "gsm": __version__,
    }
