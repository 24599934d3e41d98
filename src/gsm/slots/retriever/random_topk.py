"""A control: as many entries as the paper's retriever selects, drawn at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsm.errors import within
from gsm.hashing import mixed
from gsm.layers.attended import Attended
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm.slots.retriever.base import Retriever
from gsm_kernels.device import scratch_elements

NO_ENTRY = (1 << 31) - 1  # stands for no entry; larger than the number of any entry
NEVER = (1 << 63) - 1  # larger than any hash, with NO_ENTRY in its low bits


class RandomTopK(Retriever):
    """Draw K visible slots for every row, without replacement.

    The draw depends only on the seed, the stage, the row's position in its document and the entry's number in its
    document. So it is the same in training, prefill, decoding and packed documents, whatever tokens follow.

    Args:
        dim_in, shape: unused.
        top_k: number of entries to draw (K).
        stage: number of its stage; stages draw independently.
        seed: random seed.
    """

    def __init__(self, dim_in: int, shape: Shape, *, top_k: int, stage: int, seed: int):
        super().__init__(dim_in, shape, top_k=top_k, stage=stage)
        within(0, 2**32 - 1, seed=seed)
        self.seed, self.stage = seed, stage

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Select the drawn slots in ascending order, then -1 where fewer than K are visible; none without a bank."""
        bank = attended.bank
        if bank is None:
            return Selection(None), cache
        slots, count_BR = bank.entry_BFC.shape[1], bank.last_BR - bank.first_BR
        # In chunks of rows, to avoid a tensor of rows x slots.
        step = max(1, scratch_elements(position_BR.device) // max(1, slots * len(position_BR)))
        row_BR = mixed(mixed(mixed(position_BR.clamp(min=0)) ^ self.seed) ^ self.stage)
        chunks = zip(row_BR.split(step, dim=1), count_BR.split(step, dim=1), strict=True)
        ordinal_BRK = torch.cat([draw(*chunk, slots, self.top_k) for chunk in chunks], dim=1)
        return Selection(torch.where(ordinal_BRK == NO_ENTRY, -1, bank.first_BR[..., None] + ordinal_BRK)), cache


def draw(row_BR: Tensor, count_BR: Tensor, slots: int, top_k: int) -> Tensor:
    """Draw up to K entries for each row.

    The K entries with the lowest hashes are drawn. The low bits of a hash are the entry's number, so no two are equal.

    Args:
        row_BR: hashes of the rows.
        count_BR: number of entries that each row sees.
        slots: number of slots of the bank.
        top_k: number of entries to draw (K).

    Returns:
        The numbers of the entries in ascending order, then ``NO_ENTRY``, [B, R, K].
    """
    ordinal_F = torch.arange(slots, device=row_BR.device)
    hash_BRF = mixed(row_BR[..., None] ^ mixed(ordinal_F))
    key_BRF = torch.where(ordinal_F < count_BR[..., None], hash_BRF << 31 | ordinal_F, NEVER)
    lowest_BRK = key_BRF.topk(min(top_k, slots), largest=False, sorted=False).values & NO_ENTRY
    return torch.nn.functional.pad(lowest_BRK.sort().values, (0, max(0, top_k - slots)), value=NO_ENTRY)
