"""What all measures of trained models share: a measure is asked with its fields, taken of one checkpoint after another,
and its results are set side by side, in tables that are printed and written."""

from __future__ import annotations

import json
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gsm.config.command_line import lacks, shown
from gsm.evaluation.checkpoints import Trained, checkpoints, home, opened, writing
from gsm.evaluation.results import Grid
from gsm.experiments.table import WIDTH, grid_markdown, grid_text
from gsm.files import replacing, write_json


@dataclass(frozen=True)
class Measure(ABC):
    """A measure of trained models. A subclass declares and documents what else it is asked with, as the command line
    gives it, and checks that when it is made; its ``measure`` takes any model and gives plain containers.

    Args:
        checkpoint: a .ckpt file, the folder of a run, a folder above several runs, such as logs/<name>; or nano, which
            comes along
        device: cpu, cuda, ...; auto: a GPU if there is one
        output: the file to write, tables and pictures beside it; left out: in the folder of the run, or above several
    """

    script: ClassVar[str] = "evaluate.py"  # what its help calls it
    file: ClassVar[str]  # what it writes into the folder of a run
    takes_folder: ClassVar[bool] = False  # whether its output= is the folder of that, rather than the file

    checkpoint: str = ""
    device: str = "auto"
    output: str = ""

    def evaluate(self) -> list[dict[str, Any]]:
        """Measures all checkpoints, then prints and writes what they are together. Returns a result for each.

        Raises:
            ConfigError, FileNotFoundError: a value out of range, or a file that cannot be used; the message says which.
        """
        if not self.checkpoint:
            raise lacks(self.script, "checkpoint")
        files, place = checkpoints(self.checkpoint), Path(self.output)
        if not self.output:
            place = (home(files[0]) if len(files) == 1 else Path(self.checkpoint)) / self.file
        elif self.takes_folder:
            place = place / self.file
        in_place = self.output and len(files) == 1
        results = [self.of(one, place if in_place else self.own_file(one.file)) for one in opened(files, self.device)]
        self.conclude(results, place)
        return results

    def own_file(self, checkpoint: Path) -> Path:
        """Where the result of a checkpoint lies."""
        return home(checkpoint) / self.file

    @abstractmethod
    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """The result of one checkpoint; it may be kept in ``file``, and gone on from. Raises ConfigError."""

    @abstractmethod
    def conclude(self, results: Sequence[Mapping[str, Any]], place: Path) -> None:
        """Prints and writes what all results are together. Raises ConfigError."""

    @staticmethod
    @abstractmethod
    def metrics(written: Mapping[str, Any]) -> dict[str, float]:
        """The numbers, by name, of what it has written of one run."""

    def require(self) -> None:  # noqa: B027  # most measures need nothing
        """Raises ConfigError where this machine lacks what it takes, before anything is trained for it."""

    def metrics_in(self, folder: Path) -> dict[str, float]:
        """The same of what it has written into this folder. Raises OSError."""
        return self.metrics(self._written(folder))

    def written_in(self, folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
        """The result of one checkpoint that it has written into this folder, as ``conclude`` takes it.

        Args:
            folder: what ``output`` said.
            run: ``experiment``, ``arm`` and ``seed`` that it counts for: arms may have trained a run together.

        Raises OSError.
        """
        return {**self._written(folder), **run}

    @classmethod
    def _written(cls, folder: Path) -> dict[str, Any]:
        return json.loads((folder / cls.file).read_text(encoding="utf-8"))


def write(place: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON. Raises ConfigError."""
    with writing(place):
        write_json(place, content)


def publish(
    place: Path,
    grids: Sequence[Grid],
    notes: Sequence[str],
    content: Mapping[str, Any] | None = None,
    drawn: Callable[[], bytes] | None = None,
    further: Mapping[str, str] | None = None,
) -> str:
    """Tables and sentences as text, also written beside ``place`` as Markdown, and what was written.

    Args:
        place: a JSON file, for ``content`` where there is some.
        grids, notes: the tables, and what has to be said about them.
        content: what the file holds besides ``tables`` and ``notes``; None: there is one already.
        drawn: makes a picture (.png); where matplotlib is missing, that is said instead.
        further: other files beside it, by ending.

    Raises:
        ConfigError: a file cannot be written.
    """
    files: dict[str, bytes] = {ending: text.encode() for ending, text in (further or {}).items()}
    try:
        files |= {".png": drawn()} if drawn else {}
    except ImportError as error:  # matplotlib is an extra; the numbers do not need it
        notes = [*notes, str(error)]
    picture = [f"![]({place.stem}.png)"] if ".png" in files else []
    files[".md"] = "\n\n".join([*map(grid_markdown, grids), *notes, *picture, ""]).encode()
    with writing(place):
        if content is not None:
            write_json(place, {**content, "tables": grids, "notes": notes})
        for ending, written in files.items():
            with replacing(place.with_suffix(ending)) as file:
                file.write(written)
    lines = "\n".join(textwrap.fill(note, WIDTH) for note in notes)
    said = f"Written to {shown(place)}, {', '.join(sorted(files))} beside it"
    return "\n\n".join([*map(grid_text, grids), *([lines] if lines else []), said])
