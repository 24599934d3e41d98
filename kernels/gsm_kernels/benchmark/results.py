"""A file of results that grows row by row, so that what was measured survives an interruption."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import machine

FOLDER = Path("benchmarks/results")


class Results:
    """Rows by name in a JSON file, with what they were measured on.

    A row of another commit or other versions is not this one's: it is measured again.

    Args:
        path: of the file; it need not exist.
        facts: from `machine.facts`.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.facts = path, dict(facts)
        self.rows: dict[str, dict[str, Any]] = read(path)["rows"] if path.exists() else {}

    def has(self, name: str) -> bool:
        """Whether there is a row of this name, measured on the same commit with the same versions."""
        marks = self.rows.get(name, {})
        return name in self.rows and all(marks.get(key) == self.facts[key] for key in ("commit", "versions"))

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Put a row in place and write the file."""
        self.rows[name] = {**row, "commit": self.facts["commit"], "versions": self.facts["versions"]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({**self.facts, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def read(path: Path) -> dict[str, Any]:
    """The content of a file of results. Raises ValueError, with what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no file of results: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), dict):
        raise ValueError(f"{path} is no file of results: it holds no rows")
    return content


def usual_path(facts: Mapping[str, Any], what: str) -> Path:
    """`benchmarks/results/<device>-<date>-<what>.json`."""
    today = datetime.date.today().isoformat()
    return FOLDER / f"{machine.in_file_names(facts['device'])}-{today}-{what}.json"
