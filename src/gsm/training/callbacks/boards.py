"""What a logger needs beyond Lightning's own methods to show all that a run has to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning
import numpy as np
from torch import Tensor


@runtime_checkable
class Board(Protocol):
    """A logger with pictures; `gsm.training.callbacks.pictures` looks for these methods and no class."""

    def show_image(self, name: str, pixels_YXC: np.ndarray, step: int) -> None:
        """A picture, uint8."""
        ...

    def show_histogram(self, name: str, value_N: Tensor, step: int) -> None:
        """How numbers are distributed."""
        ...


def boards(trainer: lightning.Trainer) -> list[Any]:
    """The loggers that show pictures."""
    return [logger for logger in trainer.loggers if isinstance(logger, Board)]


class Known:
    """What a server knows the run in a folder by, so that a resumed run goes on there: noted when it has begun, since a
    folder with nothing else in it would not be taken for that of a run.

    Args:
        folder: of the run.
        library: whose server.
    """

    def __init__(self, folder: str, library: str) -> None:
        self.file = Path(folder) / f"{library}.id"

    def read(self) -> str | None:
        """What was noted; None: nothing yet."""
        return self.file.read_text(encoding="utf-8").strip() if self.file.is_file() else None

    def note(self, known: str) -> None:
        """Notes it, once."""
        if not self.file.is_file():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(known, encoding="utf-8")
