"""The paper's tables (``paper.yaml``), for ours to stand beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "paper.yaml"


@dataclass(frozen=True)
class Published:
    """A table of downstream tasks.

    Attributes:
        table: which one it is.
        columns: its models.
        average: their unweighted means over the tasks.
        rows: by task, the metric for ``dense`` models and for those with a ``mixture`` of experts, and the ``values``
            in the order of the columns (none where the paper gives averages alone).
        ruler: where the table has RULER too, its ``average`` and that of the ``longest`` length, by column.
    """

    table: str
    columns: list[str]
    average: list[float]
    rows: dict[str, dict[str, Any]]
    ruler: dict[str, list[float]] = field(default_factory=dict)


def published(name: str) -> Published | None:
    """A table of downstream tasks by its name, or None."""
    table = _tables().get(name, {})
    return Published(**table) if "average" in table and "rows" in table else None


def published_ruler() -> dict[str, Any]:
    """RULER: `columns`, and in their order `by_length`, `average` and `by_task`."""
    return _tables()["ruler"]


def published_perplexity() -> dict[str, Any]:
    """Perplexity on FineWeb: `columns`, and in their order `rows` by what was scored."""
    return _tables()["perplexity"]


def published_overlap() -> dict[int, list[float]]:
    """By length, the overlap of every stage's own selection with the encoder's, in percent of K."""
    return _tables()["overlap"]["by_length"]


def _tables() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))
