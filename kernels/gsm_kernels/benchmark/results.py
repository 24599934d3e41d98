"""A file of results that grows row by row, so that what was measured survives an interruption."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import machine

FOLDER = Path("benchmarks/results")
MARKS = ("device", "threads", "commit", "versions")  # what of the facts a row carries; a GPU has no threads


class Results:
    """Rows by name in a JSON file, with what they were measured on.

    A row of another device, number of threads, commit or other versions is not this one's: it is measured again. So is
    one that failed.

    Args:
        path: of the file; it need not exist.
        facts: from `machine.facts`.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.facts = path, dict(facts)
        self.rows: dict[str, dict[str, Any]] = read(path)["rows"] if path.exists() else {}

    def has(self, name: str, protocol: Mapping[str, Any] | None = None) -> bool:
        """Whether there is a row of this name, measured on the same device and commit, with the same threads and
        versions, and by this protocol, if it has one."""
        row = self.rows.get(name, {"failed": "not measured"})
        same = all(row.get(key) == self.facts.get(key) for key in MARKS)
        return same and not row.get("failed") and row.get("protocol") == protocol

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
        """
        began = time.monotonic()
        try:
            for name, how, measure in rows:
                if self.has(name, protocol) and not force:
                    print(f"{name}: measured already")
                elif time.monotonic() - began > 60 * minutes:
                    print(f"{minutes:g} minutes are over: the same command goes on with {name}")
                else:
                    print(f"{name}: {how}", flush=True)
                    self.add(name, {**measure(), "protocol": protocol})
        finally:
            if self.rows:
                show(self.path)
        return self.path

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Put a row in place and write the file."""
        self.rows[name] = {**row, **{key: self.facts[key] for key in MARKS if key in self.facts}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({**self.facts, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


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
    """`benchmarks/results/<device>-<date>-<what>.json`."""
    today = datetime.date.today().isoformat()
    return FOLDER / f"{machine.in_file_names(facts['device'])}-{today}-{what}.json"
