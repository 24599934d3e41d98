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
    """Select all entries that a row sees.

    Memory and time of a call grow with rows x slots. Use this for training sequences of ordinary length and for prefill
    in chunks, but not for training on very long sequences.
    """

    def work(self, bank: AttentionCost) -> LayerCost:
        """Return the cost of attention to all entries."""
        read = replace(bank, limit=sys.maxsize)
        return LayerCost(looks=(read,), bank=read)

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Select all visible slots in ascending order; none without a bank."""
        bank = attended.bank
        if bank is None:
            return Selection(None), cache
        slot_BRF = bank.first_BR[..., None] + torch.arange(bank.entry_BFC.shape[1], device=bank.first_BR.device)
        return Selection(torch.where(slot_BRF < bank.last_BR[..., None], slot_BRF, -1)), cache
