"""Downstream tasks of lm-evaluation-harness: their titles in our tables, and the local files of their documents.

``tasks.yaml`` lists them. Any other task of the harness takes its documents from the hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from gsm.config.check import unknown

TABLE = Path(__file__).with_name("tasks.yaml")
HUB = "hub"  # in the settings of results, where documents are not local files


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
            ConfigError, FileNotFoundError: the task has no local files, or the folder lacks one.
        """
        if not data:
            return {}
        if not self.files:
            raise unknown("task", self.name, known(), "the tasks with local files (data=)")
        paths = {split: Path(data) / f"{name}.jsonl" for split, name in self.files.items()}
        paths = {split: path if path.exists() else path.with_suffix(".jsonl.xz") for split, path in paths.items()}
        for path in paths.values():
            if not path.exists():
                raise FileNotFoundError(f"{data} lacks {path.with_suffix('').name} (or .jsonl.xz) of {self.name}")
        return paths

    def documents(self, data: str) -> str:
        """Return the SHA-256 of the local files, or ``hub``. Raises as ``paths`` does."""
        total = hashlib.sha256()
        for path in self.paths(data).values():
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest() if data else HUB


def load(name: str) -> Task:
    """Return a task by its name."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return Task(name, **table.get(name, {"title": name}))


def known() -> list[str]:
    """Return the names of the tasks in our tables."""
    return sorted(yaml.safe_load(TABLE.read_text(encoding="utf-8")))
