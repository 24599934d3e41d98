"""Downstream tasks of lm-evaluation-harness: their titles in our tables, and the local files of their documents.

``tasks.yaml`` lists them. Any other task of the harness takes its documents from the hub.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("tasks.yaml")
ENDINGS = (".jsonl", ".jsonl.xz")


@dataclass(frozen=True)
class Task:
    """A downstream task.

    Attributes:
        name: as in ``tasks=``.
        title: in tables.
        folder: the folder of this task among the harness's own; empty: anywhere.
        harness: the harness's name, where it is another one.
        files: names of the files of documents by split; ``test`` are the questions.
        subtask: field of a document that names its task in the harness's group of this name.
        shots: answered documents in front of each question.
        note: remark on the files, for tables.
    """

    name: str
    title: str
    folder: str = ""
    harness: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    subtask: str = ""
    shots: int | None = None
    note: str = ""

    def paths(self, data: str) -> dict[str, Path]:
        """Return the local files by split, from the folder ``data``; no folder, no files: the hub has the documents.

        Raises:
            ValueError, FileNotFoundError: the task has no local files, or the folder lacks one.
        """
        if data and not self.files:
            raise ValueError(
                f"data={data} is not allowed with task {self.name} because no local files are known for it. "
                f"{suggestion(self.name)}; or leave data out"
            )
        return {split: _path(Path(data), name, self.name) for split, name in self.files.items()} if data else {}


def load(name: str) -> Task:
    """Return a task by its name."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return Task(name, **table.get(name, {"title": name}))


def known() -> list[str]:
    """Return the names of the tasks in our tables."""
    return sorted(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def suggestion(name: str) -> str:
    """Return a hint at the known name that is close to an unknown one."""
    near = difflib.get_close_matches(name, known(), n=1)
    return f"Did you mean {near[0]}" if near else f"Known are {', '.join(known())}"


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a file, one a line. Raises ValueError that names the file."""
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            rows = [json.loads(line) for line in file]
    except (ValueError, RecursionError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is not allowed because it holds no JSON lines ({error}). Fetch it again.") from error
    if not rows:
        raise ValueError(f"{path} is not allowed because it holds no documents. Use one JSON object a line.")
    for number, row in enumerate(rows, 1):  # the harness would take a missing field for None, and score it
        if not isinstance(row, dict) or not isinstance(rows[0], dict) or row.keys() != rows[0].keys():
            raise ValueError(
                f"{path}, line {number} is not allowed because it has other fields than line 1. Fetch the file again."
            )
    return rows


def digest(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of files of documents, in hexadecimal."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _path(folder: Path, stem: str, task: str) -> Path:
    for path in (folder / f"{stem}{ending}" for ending in ENDINGS):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} lacks {stem}.jsonl (or .jsonl.xz) of {task}")
