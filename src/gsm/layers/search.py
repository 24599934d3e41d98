"""Selecting bank entries with an indexer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gsm.layers.attended import Attended, Bank
from gsm.layers.projections import IndexQuery
from gsm.observe import Name, full_name, tap
from gsm_kernels import index_top_k


class Selection(NamedTuple):
    """The result of a search in a bank.

    Attributes:
        chosen_BRK: int64, selected slots in any order, -1 for none (None: no selection). The retrievers of this project
            return them ascending, followed by -1.
        index, key_BFI: the index queries and keys of the search, to train the indexer (None: no search or no training).
        bias_BRK: zeros that carry the gradient of the selected slots' logits to an indexer (None: not used).
    """

    chosen_BRK: Tensor | None
    index: IndexQuery | None = None
    key_BFI: Tensor | None = None
    bias_BRK: Tensor | None = None

    @classmethod
    def by_layer(cls, attended: Attended) -> Selection:
        """Return the selection in ``attended``, that of the layer below or of a stage's encoder layer."""
        return cls(attended.chosen_BRK, bias_BRK=attended.bias_BRK)

    def tapped(self, name: Name, bank: Bank | None) -> Selection:
        """Offer this selection as a tap; return it, or the one that a patch sets.

        Raises:
            ValueError: if a patch selects a slot that the row may not see.
        """
        if self.chosen_BRK is None or bank is None:
            return self
        chosen_BRK = tap(name, self.chosen_BRK)
        if chosen_BRK is self.chosen_BRK or torch.equal(chosen_BRK, self.chosen_BRK):
            return self
        hidden_BRK = (chosen_BRK < bank.first_BR[..., None]) | (chosen_BRK >= bank.last_BR[..., None])
        wrong_NBRK = (hidden_BRK & (chosen_BRK != -1)).nonzero()
        if len(wrong_NBRK):
            sequence, row, place = wrong_NBRK[0].tolist()
            slot = int(chosen_BRK[sequence, row, place])
            first, last = int(bank.first_BR[sequence, row]), int(bank.last_BR[sequence, row])
            raise ValueError(
                f"{full_name(name)} must be patched with slots in [{first}, {last}) for row {row} of sequence "
                f"{sequence}, or -1 for none, got {slot}"
            )
        # The bias trains the indexer, so it stays only at slots that the indexer has selected.
        bias_BRK = None if self.bias_BRK is None else self.bias_BRK.where(chosen_BRK == self.chosen_BRK, 0)
        return self._replace(chosen_BRK=chosen_BRK, bias_BRK=bias_BRK)


def search_bank(
    index: IndexQuery, bank: Bank, key_BFI: Tensor, top_k: int, pool_BRN: Tensor | None = None
) -> Selection:
    """Select the ``top_k`` visible slots of a bank with the highest index scores for every row.

    Args:
        index: index queries and weights of the rows.
        bank: the bank.
        key_BFI: index keys of its slots.
        top_k: number of slots per row (K).
        pool_BRN: int64, candidate blocks to which the search is limited (None: the whole bank).

    Returns:
        The selection, ascending; of equal scores, the lowest slot is selected.
    """
    chosen_BRK = index_top_k(*index, key_BFI, bank.first_BR, bank.last_BR, top_k, pool_BRN)
    return Selection(chosen_BRK, index, key_BFI)
