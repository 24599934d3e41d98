"""The paper's tables (``paper.yaml``), to stand beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Published:
    """A table of downstream tasks.

    Attributes:
        table: its name in the paper.
        columns: its models.
        average: their unweighted means over the tasks.
        rows: by task, the metric for ``dense`` models and for those with a ``mixture`` of experts, and the ``values``
            in the order of the columns (none where the paper gives averages alone).
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
