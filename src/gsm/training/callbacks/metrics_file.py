"""The metrics of a run as a file: a line of JSON for each time that training logs, ``{"step": 10, "train/loss": 1.2}``.

Lines are only appended. A run that goes on logs some steps again, and the later line counts.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger


def read_metrics(path: str | os.PathLike[str]) -> dict[str, dict[int, float]]:
    """Return the values of such a file by name and step; empty without a file. A line that a killed process has left
    incomplete is skipped. Raises OSError if the file cannot be read."""
    metrics: dict[str, dict[int, float]] = {}
    for line in Path(path).read_bytes().splitlines() if os.path.isfile(path) else ():
        with suppress(ValueError):
            values = json.loads(line)
            step = values.pop("step")
            for name, value in values.items():
                metrics.setdefault(name, {})[step] = value
    return metrics


class MetricsFile(Logger):
    """Write all metrics into a file. Values that are not finite are left out: JSON has none.

    Args:
        path: the file; made with its folder at the first metric.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self._begun = False

    @property
    def name(self) -> str:
        """Name of this logger, for Lightning."""
        return "jsonl"

    @property
    def version(self) -> str:
        """Empty: the run's folder is the version."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a line. Raises OSError, which names the file."""
        finite = {name: value for name, value in metrics.items() if name != "epoch" and math.isfinite(value)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                if file.tell() and not self._begun:
                    file.write("\n")  # the process before may have been killed in the middle of a line
                file.write(json.dumps({"step": step, **finite}) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._begun = True

    @rank_zero_only
    def save(self) -> None:
        """Write the lines to the disk, so that they survive a power cut: a checkpoint relies on them."""
        if self.path.is_file():
            with self.path.open("a") as file:
                os.fsync(file.fileno())

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Log nothing: the configuration lies beside the file."""
