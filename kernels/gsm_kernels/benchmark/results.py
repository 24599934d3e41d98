"""A file of results that grows row by row, so that what was measured survives an interruption.

A row that does not end, because it takes too long or takes its process down, must not stand in the way of the others
for ever: the file says before each row that it is tried now (`Results.trying`), and the next process tries those that
were tried least first.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import machine

FOLDER = Path(os.environ.get("GSM_RESULTS") or "benchmarks/results")
CARRIED = (
    "device",
    "threads",
    "versions",
    "sources",
    "commit",
)  # what of the facts a row carries; a GPU has no threads


def mark(row: Mapping[str, Any]) -> tuple[Any, ...]:
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

    Attributes:
        rows: by name.
        tried: how often rows that were begun have failed or not ended, by name.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.facts = path, dict(facts)
        content = read(path) if path.exists() else {}
        self.rows: dict[str, dict[str, Any]] = content.get("rows", {})
        self.tried: dict[str, int] = content.get("tried", {}) if mark(content) == mark(self.facts) else {}
        self._first = True

    def has(self, name: str, protocol: Mapping[str, Any] | None = None, sources: str | None = None) -> bool:
        """Whether there is a row of this name, measured on the same device with the same threads and versions, by this
        protocol, if it has one, and of the same sources: these, or the facts'."""
        row = self.rows.get(name, {"failed": "not measured"})
        wanted = {**self.facts, **({"sources": sources} if sources else {})}
        return mark(row) == mark(wanted) and not row.get("failed") and row.get("protocol") == protocol

    def times(self, name: str) -> int:
        """How often a row was begun and has failed, or not ended; those that were tried least go first."""
        return self.tried.get(name, 0)

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
        rows: Iterable[tuple[str, str, Callable[[], Mapping[str, Any]]]],
        protocol: Mapping[str, Any],
        *,
        force: bool,
        minutes: float,
        show: Callable[[Path], object],
    ) -> Path:
        """Measures the rows that are missing, one after the other; returns the file.

        Args:
            rows: name, how it is measured in a word or two, and what measures it.
            protocol: as in `has`.
            force: also those that are there.
            minutes: after which none is begun.
            show: called with the file at the end, also after an interruption, unless there are no rows.

        Raises:
            Exception: the first that a measurement raised, once the other rows were measured.
            machine.Lost: at once, where the GPU takes no more work from this process.
        """
        began, errors = time.monotonic(), Errors()
        try:
            for name, how, measure in sorted(rows, key=lambda row: self.times(row[0])):
                if self.has(name, protocol) and not force:
                    print(f"{name}: measured already")
                elif time.monotonic() - began > 60 * minutes:
                    print(f"{minutes:g} minutes are over: the same command goes on with {name}")
                else:
                    print(f"{name}: {how}", flush=True)
                    with errors.kept(name), self.trying(name):
                        self.add(name, {**measure(), "protocol": protocol})
        finally:
            if self.rows:
                show(self.path)
        errors.raise_first()
        return self.path

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Put a row in place and write the file. A row may bring the `sources` that it depends on."""
        self.rows[name] = {**{key: self.facts[key] for key in CARRIED if key in self.facts}, **row}
        if not row.get("failed"):
            self.tried.pop(name, None)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        tried = {name: times for name, times in self.tried.items() if times}
        content = {**self.facts, **({"tried": tried} if tried else {}), "rows": self.rows}
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


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
        """Shows an error, and keeps it if it is the first."""
        traceback.print_exception(error)
        traceback.clear_frames(error.__traceback__)  # which would hold on to the tensors of what failed
        self.first = self.first or error

    def raise_first(self) -> None:
        """Raises the first error, if there was one."""
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


def usual_path(facts: Mapping[str, Any], what: str) -> Path:
    """`<device>-<what>.json` in benchmarks/results, or in the folder that GSM_RESULTS names."""
    return FOLDER / f"{machine.in_file_names(facts['device'])}-{what}.json"
