"""The selection of bank entries for an aggregation stage: the slot ``model/retriever``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gsm.layers.attended import Attended
from gsm.layers.costs import AttentionCost, LayerCost
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles
from gsm.layers.search import Selection


class Retriever(nn.Module, ABC):
    """Base of all retrievers; called by a stage once per forward.

    A retriever that searches must call its indexer ``self.indexer``: an optimiser recognises indexers by that name.

    Args:
        dim_in: width of the stage's query input.
        shape: shared widths.
        top_k: entries to select (K).
        stage: number of its stage, from 1.
    """

    # Whether this retriever uses the encoder layer's selection, so that the layer must have one.
    follows_encoder = False

    def __init__(self, dim_in: int, shape: Shape, *, top_k: int, stage: int):
        super().__init__()
        self.top_k = top_k

    def work(self, bank: AttentionCost) -> LayerCost:
        """Return the cost of reading K bank entries for each row, or the encoder layer's entries.

        A retriever that searches adds the cost of its search.

        Args:
            bank: cost of the encoder layer's attention to its bank.
        """
        read = bank if self.follows_encoder else replace(bank, limit=self.top_k)
        return LayerCost(looks=(read,), bank=read)

    def start(self, batch: int, ratio: int) -> Any:
        """Return an empty cache for ``batch`` sequences, over a bank with a slot for every ``ratio`` tokens.

        None if this retriever has no cache.
        """
        return None

    @abstractmethod
    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Select bank entries for every row of a stage.

        Args:
            x_BRU: normed input of the stage's query.
            attended: window and bank of the encoder layer, for the same rows.
            position_BR: int64, document-local positions of the rows, -1 for padding.
            angles: rotation of the rows.
            cache: the cache of this retriever.

        Returns:
            The selection, and the cache after the call.
        """
