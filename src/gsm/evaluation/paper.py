"""The paper's tables (``paper.yaml``), to stand beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Published:
    """A table of the paper with results on downstream tasks.

    Attributes:
        table: its name in the paper.
        columns: names of the models.
        average: unweighted mean over the tasks, for each model.
        rows: by task, the metrics of ``dense`` models and of a ``mixture`` of experts, and the ``values`` for each
            model (empty where the paper prints only averages).
    """

    table: str
    columns: list[str]
    average: list[float]
    rows: dict[str, dict[str, Any]]


def published(name: str) -> Published | None:
    """Return a table of downstream tasks by its name (``paper``, ``ablation``), or None."""
    table = tables().get(name, {})
    return Published(**table) if "average" in table and "rows" in table else None


def tables() -> dict[str, Any]:
    """Return all tables. ``ruler``: ``columns``, and in their order ``by_length``, ``average``, ``by_task``;
    ``perplexity``: ``columns`` and ``rows``; ``overlap``: ``by_length``, in percent of K for each stage."""
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))
