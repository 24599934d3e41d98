"""The common part of all measures of trained models: a measure has its arguments as fields, measures one checkpoint
after another, and sets its results side by side, in tables that are printed and written."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gsm.config.command_line import lacks, path_text
from gsm.errors import ConfigError
from gsm.evaluation.checkpoints import Trained, checkpoints, home, opened, writing
from gsm.files import damage, read_json, write_json, write_whole
from gsm.tables import WIDTH, Grid, grid_markdown, grid_text


@dataclass(frozen=True)
class Measure(ABC):
    """A measure of trained models.

    A subclass declares and documents its further arguments, as the command line gives them, and checks them in
    ``__post_init__``.

    Args:
        checkpoint: the folder of a run, of one of its steps, or above several runs, such as logs/<name>; or nano,
            which comes along
        device: cpu, cuda, ...; auto: a GPU if there is one
        output: the file to write, tables and pictures beside it; left out: in the folder of the run, or above several
    """

    script: ClassVar[str] = "evaluate.py"  # its name in its help
    file: ClassVar[str]  # the name of its file in the folder of a run
    takes_folder: ClassVar[bool] = False  # whether output= is the folder of that file, rather than the file

    checkpoint: str = ""
    device: str = "auto"
    output: str = ""

    def evaluate(self) -> list[dict[str, Any]]:
        """Measure all checkpoints, print and write their comparison, and return a result for each.

        Raises:
            ConfigError, FileNotFoundError: a value out of range, or a file that cannot be used; the message names it.
        """
        self.require()
        if not self.checkpoint:
            raise lacks(self.script, "checkpoint")
        files, place = checkpoints(self.checkpoint), Path(self.output)
        if not self.output:
            place = (home(files[0]) if len(files) == 1 else Path(self.checkpoint)) / self.file
        elif self.takes_folder:
            place = place / self.file
        in_place = self.output and len(files) == 1
        results = [
            self.of(trained, place if in_place else home(trained.file) / self.file)
            for trained in opened(files, self.device)
        ]
        self.conclude(results, place)
        return results

    @abstractmethod
    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """Return the result of one checkpoint; ``file`` may keep it, and continue it. Raises ConfigError."""

    @abstractmethod
    def conclude(self, results: Sequence[Mapping[str, Any]], place: Path) -> None:
        """Print and write the comparison of all results. Raises ConfigError."""

    @staticmethod
    @abstractmethod
    def metrics(written: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of the written result of one run, by name."""

    def require(self) -> None:  # noqa: B027  # most measures need nothing
        """Raise ConfigError where this machine lacks a library, before anything is trained for this measure."""

    def metrics_in(self, folder: Path) -> dict[str, float]:
        """Return the numbers of the result in this folder. Raises OSError."""
        return self.metrics(self._written(folder))

    def written_in(self, folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of one checkpoint from this folder, as ``conclude`` takes it.

        Args:
            folder: the value of ``output``.
            run: the ``experiment``, ``arm`` and ``seed`` of the result: arms may have trained a run together.

        Raises OSError.
        """
        return {**self._written(folder), **run}

    @classmethod
    def _written(cls, folder: Path) -> dict[str, Any]:
        return own_json(folder / cls.file)


def own_json(file: Path) -> dict[str, Any]:
    """Return the content of a measure's file. Raises ConfigError where it is gone, or is something else."""
    written = read_json(file)
    if written is None:
        raise ConfigError(damage(file) or f"{file} is gone. Use the command that wrote it again.")
    return written


def write(place: Path, content: Mapping[str, Any]) -> None:
    """Write JSON. Raises ConfigError."""
    with writing(place):
        write_json(place, content)


def publish(
    place: Path,
    grids: Sequence[Grid],
    notes: Sequence[str],
    content: Mapping[str, Any] | None = None,
    drawn: Callable[[], bytes] | None = None,
) -> str:
    """Write tables and sentences beside ``place`` as Markdown, and return them as text, with the names of the files.

    Args:
        place: a JSON file, for ``content`` where there is some.
        grids, notes: the tables, and sentences about them.
        content: the content of the file but for ``tables`` and ``notes``; None: the file exists already.
        drawn: makes a picture (.png); where matplotlib is missing, its error becomes a note.

    Raises:
        ConfigError: a file cannot be written.
    """
    files: dict[str, bytes] = {}
    try:
        files |= {".png": drawn()} if drawn else {}
    except ImportError as error:  # matplotlib is an extra; the numbers do not need it
        notes = [*notes, str(error)]
    picture = [f"![]({place.stem}.png)"] if ".png" in files else []
    files[".md"] = "\n\n".join([*map(grid_markdown, grids), *notes, *picture, ""]).encode()
    with writing(place):
        if content is not None:
            write_json(place, {**content, "tables": grids, "notes": notes})
        for ending, text in files.items():
            write_whole(place.with_suffix(ending), text)
    lines = "\n".join(textwrap.fill(note, WIDTH) for note in notes)
    written = f"Written to {path_text(place)}, {', '.join(sorted(files))} beside it"
    return "\n\n".join([*map(grid_text, grids), *([lines] if lines else []), written])
