"""Metrics as plain text, one ``step,name,value`` line each.

Lines are appended, so that an interrupted run loses nothing and a resumed one goes on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger


class MetricsFile(Logger):
    """Writes a CSV file with the columns ``step``, ``name`` and ``value``.

    A resumed run repeats the steps after its checkpoint: of two lines with the same step and name, the later one holds.

    Args:
        path: the file; made with its folder at the first metric.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)

    @property
    def name(self) -> str:
        """Of this logger, for Lightning."""
        return "csv"

    @property
    def version(self) -> str:
        """None: the run's folder is the version."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Appends one line for each metric."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            if is_new:
                file.write("step,name,value\n")
            file.writelines(f"{step},{name},{value:.8g}\n" for name, value in metrics.items() if name != "epoch")

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Nothing: the configuration lies beside the file."""
