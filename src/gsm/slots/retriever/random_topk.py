"""A control: the same number of entries as the paper's retriever, drawn at random."""

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

NO_ENTRY = (1 << 31) - 1  # larger than every ordinal of a bank: no entry
NEVER = (1 << 63) - 1  # larger than every hash, with NO_ENTRY in its low bits


class RandomTopK(Retriever):
    """Draw K visible slots for every row, without replacement.

    The draw is a function of the seed, the stage, the row's position in its document and the entry's number in its
    document. So it is the same in training, prefill, decoding and packed documents, and later tokens do not change it.

    Args:
        dim_in, shape: unused.
        top_k: entries to draw (K).
        stage: number of its stage; stages draw independently.
        seed: seed of the draws.
    """

    def __init__(self, dim_in: int, shape: Shape, *, top_k: int, stage: int, seed: int):
        super().__init__(dim_in, shape, top_k=top_k, stage=stage)
        within(0, 2**32 - 1, seed=seed)
        self.seed, self.stage = seed, stage

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Select the drawn slots, ascending, -1 where fewer than K are visible; without a bank, none."""
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
    """Draw K of the first ``count_BR`` of ``slots`` ordinals; return them ascending, padded with ``NO_ENTRY``.

    ``row_BR`` are hashes of the rows. The ordinals with the K lowest hashes are drawn. Each hash has its ordinal in the
    low bits, so no two are equal.
    """
    ordinal_F = torch.arange(slots, device=row_BR.device)
    hash_BRF = mixed(row_BR[..., None] ^ mixed(ordinal_F))
    key_BRF = torch.where(ordinal_F < count_BR[..., None], hash_BRF << 31 | ordinal_F, NEVER)
    lowest_BRK = key_BRF.topk(min(top_k, slots), largest=False, sorted=False).values & NO_ENTRY
    return torch.nn.functional.pad(lowest_BRK.sort().values, (0, max(0, top_k - slots)), value=NO_ENTRY)
