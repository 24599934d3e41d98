"""An upper bound: the stages read the whole bank."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gsm.layers.attended import Attended
from gsm.layers.costs import AttentionCost, LayerCost
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm.slots.retriever.base import Retriever


class Dense(Retriever):
    """Select every visible entry.

    The selection is as long as the bank, so a call needs memory and time for rows x slots. Use it for training
    sequences of ordinary length and for prefill in chunks, but not for training on very long sequences.
    """

    def work(self, bank: AttentionCost) -> LayerCost:
        """Return the cost of reading all entries for each row."""
        read = replace(bank, limit=sys.maxsize)
        return LayerCost(looks=(read,), bank=read)

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Select all visible slots, ascending; without a bank, none."""
        bank = attended.bank
        if bank is None:
            return Selection(None), cache
        slot_BRF = bank.first_BR[..., None] + torch.arange(bank.entry_BFC.shape[1], device=bank.first_BR.device)
        return Selection(torch.where(slot_BRF < bank.last_BR[..., None], slot_BRF, -1)), cache
