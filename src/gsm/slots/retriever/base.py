"""Which bank entries an aggregation stage may read: the slot ``model/retriever``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gsm.costs.primitives import AttentionCost, LayerCost
from gsm.layers.attended import Attended
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles
from gsm.layers.search import Selection


class Retriever(nn.Module, ABC):
    """Base of all retrievers; called by a stage once per forward.

    Args:
        dim_in: width of the stage's query input.
        shape: shared widths.
        top_k: entries to select (K).
        stage: number of its stage, from 1.

    One that searches calls its indexer ``indexer``: so it learns as indexers do.
    """

    # Whether this retriever takes over what the encoder layer has selected, so that the layer has to select.
    follows_encoder = False

    def __init__(self, dim_in: int, shape: Shape, *, top_k: int, stage: int):
        super().__init__()
        self.top_k = top_k

    def work(self, bank: AttentionCost) -> LayerCost:
        """What it costs: K bank entries for each row of the stage, or those of the encoder layer; and what searching
        them takes, where it does.

        Args:
            bank: how rows of the encoder layer attend to their bank.
        """
        read = bank if self.follows_encoder else replace(bank, limit=self.top_k)
        return LayerCost(looks=(read,), bank=read)

    def start(self, batch: int, ratio: int) -> Any:
        """An empty cache for ``batch`` sequences, over a bank with a slot for every ``ratio`` tokens (None: this
        retriever keeps nothing)."""
        return None

    @abstractmethod
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
