"""The base class of all measures of trained models. A measure has its arguments as fields, measures one checkpoint
after another, and prints and writes tables of the arms."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gsm.config.check import contrast, few, flat
from gsm.config.command_line import lacks, path_text
from gsm.errors import ConfigError
from gsm.evaluation.checkpoints import Trained, checkpoints, home, opened, writing
from gsm.evaluation.divided import join
from gsm.evaluation.records import Arms, Measured, by_arm, read
from gsm.files import write_json, write_whole
from gsm.tables import WIDTH, Grid, grid_markdown, grid_text


@dataclass(frozen=True)
class Measure(ABC):
    """A measure of trained models. A subclass declares its own arguments as fields, documents them in its docstring,
    which ``--help`` prints, and checks them in ``__post_init__``.

    Args:
        checkpoint: the folder of a run, of one of its steps, or above several runs, such as logs/<name>; or a
            model in the package, such as nano or needle_gsm
        device: cpu, cuda, ...; auto: a GPU if there is one
        output: the folder to write to; left out: that of the run, or above several; records lie in the run's folder
    """

    script: ClassVar[str] = "evaluate.py"  # its name in its help
    name: ClassVar[str]  # of its files: the records are <name>.jsonl, the tables <name>.md and <name>.json

    checkpoint: str = ""
    device: str = "auto"
    output: str = ""

    def evaluate(self) -> list[Measured]:
        """Measure all checkpoints, print and write their tables, and return the records of each.

        Processes that torchrun has started divide the parts of every measure; the first one prints and writes.

        Raises:
            ConfigError, FileNotFoundError: a value out of range, or a file that cannot be used; the message names it.
        """
        self.require()
        if not self.checkpoint:
            raise lacks(self.script, "checkpoint")
        files = checkpoints(self.checkpoint)
        above = Path(self.checkpoint) if Path(self.checkpoint).is_dir() else Path(self.checkpoint).parent
        place = Path(self.output or (home(files[0]) if len(files) == 1 else above))
        runs, ranks = [], join()
        for trained in opened(files, self.device, ranks):
            _ = trained.saved  # read before a folder is made
            folder = place if len(files) == 1 else home(trained.file)
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            runs.append(self.of(trained, folder / f"{self.name}.jsonl"))
        if ranks.rank == 0:
            self.conclude(runs, place / self.name)
        return runs

    @abstractmethod
    def of(self, trained: Trained, file: Path | None) -> Measured:
        """Return the records of one checkpoint; those in ``file`` are not measured again. Raises ConfigError."""

    def conclude(self, runs: Sequence[Measured], place: Path) -> None:
        """Print the tables of all runs, and write them to ``<place>.md`` and ``<place>.json``, a picture beside them.

        Raises ConfigError for runs that were asked different questions.
        """
        self.check(runs)
        arms = by_arm(runs)
        grids, notes, files = self.tables(arms), self.notes(arms), dict[str, bytes]()
        try:
            files |= {".png": drawn} if (drawn := self.picture(arms)) else {}
        except ImportError as error:  # matplotlib is an extra; the numbers do not need it
            notes = [*notes, str(error)]
        shown = [f"![]({place.name}.png)"] if files else []
        files[".md"] = "\n\n".join([*map(grid_markdown, grids), *notes, *shown, ""]).encode()
        with writing(place):
            write_json(place.with_name(f"{place.name}.json"), {"tables": grids, "notes": notes})
            for ending, content in files.items():
                write_whole(place.with_name(place.name + ending), content)
        lines = "\n".join(textwrap.fill(note, WIDTH) for note in notes)
        written = f"Written to {path_text(place)}.json, {', '.join(sorted(files))}"
        print("\n\n".join([*map(grid_text, grids), *([lines] if lines else []), written]))

    def check(self, runs: Sequence[Measured]) -> None:
        """Raise ConfigError, which names the keys that differ, for runs that were asked different questions."""
        first, *others = (flat(one.settings["questions"]) for one in runs)
        for one in others:
            if changes := contrast(first, one, sorted(first.keys() | one.keys())):
                raise ConfigError(f"questions must be the same for runs side by side, got {few(changes)}")

    @abstractmethod
    def tables(self, arms: Arms) -> list[Grid]:
        """Return the tables of all arms."""

    def notes(self, arms: Arms) -> list[str]:
        """Return sentences about the tables."""
        return []

    def picture(self, arms: Arms) -> bytes | None:
        """Return a picture (.png), or None. Raises ImportError without matplotlib."""
        return None

    @abstractmethod
    def metrics(self, measured: Measured) -> dict[str, Any]:
        """Return the numbers of one run for the tables of experiments, by name."""

    def require(self) -> None:  # noqa: B027  # most measures need nothing
        """Raise ConfigError where this machine lacks a library, before anything is trained for this measure."""

    def read(self, folder: Path, run: Mapping[str, Any]) -> Measured:
        """Return the records that the last command with ``output=folder`` has written.

        Args:
            folder: the value of ``output``.
            run: the ``experiment``, ``arm`` and ``seed`` of the result: arms may have trained a run together.

        Raises ConfigError, OSError.
        """
        if not (known := read(file := folder / f"{self.name}.jsonl")):
            raise ConfigError(f"{file} is missing; run the command that writes it again")
        return replace(known[-1], run=dict(run))
