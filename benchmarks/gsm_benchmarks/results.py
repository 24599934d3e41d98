"""A file of results that grows row by row, and the table that is made of it.

A row that does not end, because it takes too long or takes its process down, must not stand in the way of the others
for ever: the file says before each row that it is tried now (`Results.trying`), and the next process tries those that
were tried least first (`Results.in_time`).
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from gsm.paths import ROOT

from . import machine

# Not where results are kept that are committed: what is worth that is copied there.
FOLDER = Path(os.environ.get("GSM_RESULTS") or ROOT / "logs/benchmarks")
# What of the facts a row carries; a GPU has no threads.
CARRIED = ("device", "threads", "versions", "sources", "commit")

Row = Mapping[str, Any]
T = TypeVar("T")


def mark(row: Row) -> tuple[Any, ...]:
    """What a row has to share with others to be compared with them: the device, its threads, the versions, and the
    sources that were measured; of a row that does not name its sources, the commit."""
    return *(row.get(key) for key in CARRIED[:3]), row.get("sources") or row.get("commit")


class Results:
    """Rows by name in a JSON file, with what they were measured on.

    A row of another device, number of threads, of other versions or sources is not this one's: it is measured again. So
    is one that failed.

    Args:
        path: of the file; it need not exist.
        facts: from `machine.facts`.
        minutes: from now on, after which `in_time` gives out nothing more.

    Attributes:
        rows: by name.
        sources: a fingerprint of what a row depends on, by its name, where that is less than the facts say.
        given: what makes the model of a row more than its name (`entries.Model.given`), by the row's name.
        tried: how often rows that were begun have failed or not ended, by name.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], minutes: float = 7.5) -> None:
        self.path, self.facts, self.minutes = path, dict(facts), minutes
        self.end = time.monotonic() + 60 * minutes
        content = read(path) if path.exists() else {}
        self.rows: dict[str, dict[str, Any]] = content.get("rows", {})
        self.tried: dict[str, int] = content.get("tried", {}) if mark(content) == mark(self.facts) else {}
        self.sources: dict[str, str] = {}
        self.given: dict[str, dict[str, Any]] = {}
        self._first = True

    def has(self, name: str, protocol: Mapping[str, Any] | None = None) -> bool:
        """Whether there is a row of this name, measured on the same device with the same threads and versions, of the
        same sources and model, and by this protocol, if it has one."""
        row, own = self.rows.get(name, {"failed": "not measured"}), self._carried(name)
        alike = mark(row) == mark(own) and row.get("given") == own.get("given")
        return alike and not row.get("failed") and row.get("protocol") == protocol

    def times(self, name: str) -> int:
        """How often a row was begun and has failed, or not ended."""
        return self.tried.get(name, 0)

    def in_time(self, wanted: Iterable[T], times: Callable[[T], int] | None = None) -> Iterator[T]:
        """The names of rows, those that were tried least first, till the minutes are over. For what is no name, `times`
        says how often it was tried."""
        tried: Callable[[Any], int] = times or self.times
        left = sorted(wanted, key=tried)
        for number, one in enumerate(left):
            if self.is_over():
                print(f"{self.minutes:g} minutes are over, {len(left) - number} left: the same command goes on")
                return
            yield one

    def is_over(self) -> bool:
        """Whether the minutes are."""
        return time.monotonic() > self.end

    @contextmanager
    def trying(self, *names: str) -> Iterator[None]:
        """Inside the block, these rows are measured and added. If that ends the process, the next one knows (`tried`).
        An interruption counts only against what a process began with: what came later had not all the time."""
        first, self._first = self._first, False
        self.tried |= {name: self.times(name) + 1 for name in names}
        self._write()
        try:
            yield
        except KeyboardInterrupt:
            if not first:
                self.tried |= {name: self.tried[name] - 1 for name in names if name in self.tried}
                self._write()
            raise

    def fill(
        self,
        rows: Mapping[str, Callable[[], Row]],
        protocol: Mapping[str, Any],
        *,
        force: bool,
        show: Callable[[Path], object],
    ) -> Path:
        """Measure the rows that are missing, one after the other; return the file.

        Args:
            rows: what measures each, by name.
            protocol: as in `has`.
            force: also those that are there.
            show: called with the file at the end, also after an interruption, unless there are no rows.

        Raises:
            Exception: the first that a measurement raised, once the other rows were measured.
            machine.Lost: at once, where the GPU takes no more work from this process.
        """
        errors = Errors()
        try:
            for name in self.in_time([name for name in rows if force or not self.measured(name, protocol)]):
                print(f"{name}: {', '.join(f'{what} {value}' for what, value in protocol.items())}", flush=True)
                with errors.kept(name), self.trying(name):
                    self.add(name, {**rows[name](), "protocol": protocol})
        finally:
            if self.rows:
                show(self.path)
        errors.raise_first()
        return self.path

    def measured(self, name: str, protocol: Mapping[str, Any]) -> bool:
        """As `has`, and says so."""
        there = self.has(name, protocol)
        if there:
            print(f"{name}: measured already")
        return there

    def add(self, name: str, row: Row) -> None:
        """Put a row in place and write the file."""
        self.rows[name] = {**self._carried(name), **row}
        if not row.get("failed"):
            self.tried.pop(name, None)
        self._write()

    def _carried(self, name: str) -> dict[str, Any]:
        """What of the facts a row has, with its own sources, and what its model was given."""
        own: dict[str, Any] = {"sources": self.sources[name]} if name in self.sources else {}
        own |= {"given": self.given[name]} if self.given.get(name) else {}
        return {**{key: self.facts[key] for key in CARRIED if key in self.facts}, **own}

    def _write(self) -> None:
        tried = {name: times for name, times in self.tried.items() if times}
        write(self.path, {**self.facts, **({"tried": tried} if tried else {}), "rows": self.rows})


class Errors:
    """What went wrong with some rows, and is raised when the others were measured: one row's error says nothing of the
    others, unless the GPU is lost with it."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    @contextmanager
    def kept(self, what: str) -> Iterator[None]:
        """Inside the block, `what` is measured. Raises machine.Lost if nothing more can be measured after an error."""
        try:
            yield
        except machine.Lost:
            raise
        except Exception as error:  # whatever it is, it is shown now and raised later
            self.note(error)
            machine.still_alive(what)

    def note(self, error: Exception) -> None:
        """Show an error, and keep it if it is the first."""
        traceback.print_exception(error)
        traceback.clear_frames(error.__traceback__)  # which would hold on to the tensors of what failed
        self.first = self.first or error

    def raise_first(self) -> None:
        """Raise the first error, if there was one."""
        if self.first is not None:
            raise self.first


def sentence(error: Exception) -> str:
    """Its kind, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def read(path: Path, field: str | None = None) -> dict[str, Any]:
    """The content of a file of results, of which every row has this field, if one is named: rows of another benchmark
    do not. Raises ValueError, with what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no file of results: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), dict):
        raise ValueError(f"{path} is no file of results: it holds no rows")
    other = [name for name, row in content["rows"].items() if field and field not in row]
    if other:
        raise ValueError(f"{path} is a file of another benchmark: its row '{other[0]}' has no {field}")
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of results, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


@dataclass(frozen=True)
class Asked:
    """What every benchmark that measures is asked with; configs/benchmark.yaml says what it means."""

    device: str = "auto"
    output: str = ""
    results: str = ""
    force: bool = False
    minutes: float = 7.5

    def open(self, what: str, device: torch.device, models: bool = False) -> Results:
        """The file of a benchmark, which need not exist. Raises ValueError if there is one that holds no rows."""
        facts = machine.facts(device, models)
        return Results(Path(self.output) if self.output else usual_path(facts, what), facts, self.minutes)


def usual_path(facts: Mapping[str, Any], what: str) -> Path:
    """`<device>-<what>.json` in logs/benchmarks, or in the folder that GSM_RESULTS names."""
    return FOLDER / f"{machine.in_file_names(facts['device'])}-{what}.json"


def publish(path: Path, *sections: str, picture: Callable[[], bytes] | None = None) -> Path:
    """Write what a file of results says beside it, as Markdown under its name, print it, and draw the picture where
    matplotlib is installed; return the file."""
    text = "\n\n".join([f"# {path.stem}", *filter(None, sections)]) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    try:
        if picture:
            path.with_suffix(".png").write_bytes(picture())
    except (ImportError, ValueError) as error:  # no matplotlib, or nothing that was measured
        print(error)
    return path


def measured_on(content: Mapping[str, Any]) -> str:
    """The device, versions, commit and command of a file of results."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"{content['device']}, {versions}, commit {content['commit']}, `{content['command']}`."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the last cells of a row may be left out."""
    whole = [[*cells, *[""] * (len(head) - len(cells))] for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in whole)


def rate(number: float, unit: str) -> str:
    """Three digits with T or G."""
    return f"{number / 1e12:.3g} T{unit}" if number >= 1e11 else f"{number / 1e9:.3g} G{unit}"


def quartiles(found: Mapping[str, float], parts: int = 1) -> str:
    """A median with its quartiles, of each of so many parts."""
    median, low, high = (found[key] / parts for key in ("median", "low", "high"))
    return f"{median:.4g} ({low:.4g} to {high:.4g})"


def verdict(goal: str, found: str | None, met: bool) -> str:
    """One line: the goal, what was measured, None for nothing, and whether that is enough."""
    return f"{goal}: not measured" if found is None else f"{goal}: {found}, {'met' if met else 'missed'}"
