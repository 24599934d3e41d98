"""Which bank entries an aggregation stage may read: the slot ``model/retriever``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gsm.layers.attended import Attended
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles
from gsm.layers.search import Selection


class Retriever(nn.Module):
    """Base of all retrievers; called by a stage once per forward.

    Args:
        dim_in: width of the stage's query input.
        shape: shared widths.
        top_k: entries to select (K).
        stage: number of its stage, from 1.

    One that searches calls its indexer ``indexer``: so it learns as indexers do. That and ``reads`` are what it costs.
    """

    # Whether this retriever takes over what the encoder layer has selected, so that the layer has to select.
    follows_encoder = False

    def __init__(self, dim_in: int, shape: Shape, *, top_k: int, stage: int):
        super().__init__()
        self.top_k = top_k

    @property
    def reads(self) -> int | None:
        """Of v visible bank entries, a row reads min(v, reads); None: as many as the encoder layer. For the cost."""
        return None if self.follows_encoder else self.top_k

    def start(self, batch: int, ratio: int) -> Any:
        """An empty cache for ``batch`` sequences, over a bank with a slot for every ``ratio`` tokens (None: this
        retriever keeps nothing)."""
        return None

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Selects for every row of a stage.

        Args:
            x_BRU: normed input of the stage's query.
            attended: what the encoder layer looked at, for the same rows.
            position_BR: int64, document-local positions of the rows, -1 for padding.
            angles: rotation of the rows.
            cache: what this retriever remembers.

        Returns:
            the selection, and the cache after the call.
        """
        raise TypeError(f"{type(self).__name__} does not define forward(x_BRU, attended, position_BR, angles, cache)")
