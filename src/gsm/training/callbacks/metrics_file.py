"""Metrics as plain text, one ``step,name,value`` line each.

Lines are appended, so that an interrupted run loses nothing and a resumed one goes on where its checkpoint stands.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from gsm.files import write_whole

HEADER = "step,name,value\n"
LINE = re.compile(r"(\d{1,15}),[^,\n]+,[^,\n]+\n")


def read_metrics(path: str | os.PathLike[str]) -> dict[str, dict[int, float]]:
    """Read such a file: values by name and step. If a step has two lines, the later line counts.

    Lines that a killed process has garbled are left out, and so are values that are not finite numbers. The result is
    empty if the path does not exist or is no file. Raises OSError where it cannot be read.
    """
    metrics: dict[str, dict[int, float]] = {}
    if os.path.isfile(path):
        for line in filter(LINE.fullmatch, _lines(path)):
            step, name, value = line.rstrip("\n").split(",")
            with contextlib.suppress(ValueError):
                if math.isfinite(number := float(value)):
                    metrics.setdefault(name, {})[int(step)] = number
    return metrics


class MetricsFile(Logger):
    """Write a CSV file with the columns ``step``, ``name`` and ``value``.

    Args:
        path: the file; made with its folder at the first metric.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)

    @property
    def name(self) -> str:
        """Name of this logger, for Lightning."""
        return "csv"

    @property
    def version(self) -> str:
        """Empty: the run's folder is the version."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one line for each metric, by name: Lightning gives them in the order in which they first came.

        Raises OSError, which names the file.
        """
        lines = [f"{step},{name},{value:.8g}\n" for name, value in sorted(metrics.items()) if name != "epoch"]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(("" if file.tell() else HEADER) + "".join(lines))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Drop the lines after ``step``, and lines that a killed process or a disk has garbled."""
        if not self.path.is_file():
            return
        lines = [line for line in _lines(self.path)[1:] if (match := LINE.fullmatch(line)) and int(match[1]) <= step]
        write_whole(self.path, "".join([HEADER, *lines]).encode())

    @rank_zero_only
    def save(self) -> None:
        """Write the lines to the disk, so that they survive a power cut: a checkpoint relies on them."""
        if self.path.is_file():
            with self.path.open("a") as file:
                os.fsync(file.fileno())

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Log nothing: the configuration lies beside the file."""


def _lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of such a file, garbled bytes replaced. Raises OSError."""
    return Path(path).read_bytes().decode("utf-8", errors="replace").splitlines(keepends=True)
