"""Searching a bank with an indexer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gsm.layers.attended import Attended, Bank
from gsm.layers.projections import IndexQuery
from gsm_kernels import index_top_k


class Selection(NamedTuple):
    """The result of a search in a bank.

    Attributes:
        chosen_BRK: int64, selected slots, any number of them in any order, -1 anywhere for none; those of this project
            ascend, with -1 behind (None: nothing is selected).
        index, key_BFI: what an indexer searched with, for what it learns (None: nothing was searched, or nothing can
            be learned).
        bias_BRK: zeros that carry the gradient of the selected slots' logits to an indexer (None: none learns so).
    """

    chosen_BRK: Tensor | None
    index: IndexQuery | None = None
    key_BFI: Tensor | None = None
    bias_BRK: Tensor | None = None

    @classmethod
    def by_layer(cls, attended: Attended) -> Selection:
        """The selection that the rows already have, of the layer below or of a stage's own layer, taken over."""
        return cls(attended.chosen_BRK, bias_BRK=attended.bias_BRK)


def search_bank(
    index: IndexQuery, bank: Bank, key_BFI: Tensor, top_k: int, pool_BRN: Tensor | None = None
) -> Selection:
    """The best ``top_k`` visible slots of a bank for every row, ascending; ties go to the lowest slot."""
    chosen_BRK = index_top_k(*index, key_BFI, bank.first_BR, bank.last_BR, top_k, pool_BRN)
    return Selection(chosen_BRK, index, key_BFI)
