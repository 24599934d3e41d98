"""The selection of bank entries for an aggregation stage: the config group ``model/retriever``."""

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
    """Base of all retrievers. A stage calls its retriever once per forward.

    A retriever with an indexer must store it as ``self.indexer``: parameters of indexers are recognised by that name.

    Args:
        dim_in: width of the stage's query input (U).
        shape: widths that all attention layers share.
        top_k: number of entries to select (K).
        stage: number of its stage, counted from 1.
    """

    # Whether this retriever uses the selection of the encoder layer, which must then have one.
    follows_encoder = False

    def __init__(self, dim_in: int, shape: Shape, *, top_k: int, stage: int):
        super().__init__()
        self.top_k = top_k

    def work(self, bank: AttentionCost) -> LayerCost:
        """Return the cost of attention to the selected entries, at most K per row. A retriever with an indexer adds the
        cost of its search.

        Args:
            bank: cost of the encoder layer's attention to its bank.
        """
        read = bank if self.follows_encoder else replace(bank, limit=self.top_k)
        return LayerCost(looks=(read,), bank=read)

    def start(self, batch: int, ratio: int) -> Any:
        """Return an empty cache for ``batch`` sequences and a bank with a slot for every ``ratio`` tokens; None if the
        retriever has no cache."""
        return None

    @abstractmethod
    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Select bank entries for every row of a stage.

        Args:
            x_BRU: normed input of the stage's query.
            attended: window and bank of the encoder layer, for the same rows.
            position_BR: int64, positions of the rows in their documents, -1 for padding.
            angles: rotation of the rows.
            cache: the cache of this retriever.

        Returns:
            The selection, and the cache after the call.
        """
