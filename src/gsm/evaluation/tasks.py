"""Downstream tasks of lm-evaluation-harness: their titles in our tables, and the local files of their documents.

``tasks.yaml`` lists them. Any other task of the harness takes its documents from the hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from gsm.config.check import unknown

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
            raise unknown("task", self.name, known(), "the tasks with local files (data=)")
        return {split: _path(Path(data), name, self.name) for split, name in self.files.items()} if data else {}


def load(name: str) -> Task:
    """Return a task by its name."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return Task(name, **table.get(name, {"title": name}))


def known() -> list[str]:
    """Return the names of the tasks in our tables."""
    return sorted(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


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
