"""The paper's ablation: every stage has its own indexer over the same bank (section 4.4.1)."""

from __future__ import annotations

from torch import Tensor

from gsm.cache.store import Column, ColumnStore
from gsm.layers.attended import Attended
from gsm.layers.costs import AttentionCost, LayerCost, Store
from gsm.layers.projections import Indexer, Shape
from gsm.layers.rope import Angles
from gsm.layers.search import Selection, search_bank
from gsm.slots.retriever.base import Retriever


class SeparateIndexer(Retriever):
    """Search with the stage's own index queries, weights and keys. The keys are computed from the bank's entries before
    their rotation.

    Args:
        dim_in: width of the stage's query input (U).
        shape: widths that all attention layers share.
        top_k: number of entries to select (K).
        stage: unused.
    """

    def __init__(self, dim_in: int, shape: Shape, *, top_k: int, stage: int):
        super().__init__(dim_in, shape, top_k=top_k, stage=stage)
        self.indexer = Indexer(dim_in, dim_in, shape, owns_keys=True)

    def work(self, bank: AttentionCost) -> LayerCost:
        """Return the cost of attention to K entries, of the search, and of making and storing index keys."""
        keys = Store("index_keys", self.indexer.width, ratio=bank.ratio)
        return super().work(bank) + self.indexer.work(bank.ratio) + LayerCost(stores=(keys,))

    def start(self, batch: int, ratio: int) -> Column:
        """Return an empty store of index keys."""
        like = self.indexer.query.weight
        return Column.empty("index_keys", ratio, like.new_empty(batch, self.indexer.width))

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: ColumnStore
    ) -> tuple[Selection, ColumnStore]:
        """Select the K visible slots with the highest scores; none without a bank."""
        bank = attended.bank
        if bank is None:
            return Selection(None), cache
        new_BGI = self.indexer.keys(bank.latent_BGC, bank.angles)
        key_BFI, cache = cache.place(new_BGI, bank.slots)
        return search_bank(self.indexer(x_BRU, x_BRU, angles), bank, key_BFI, self.top_k), cache
