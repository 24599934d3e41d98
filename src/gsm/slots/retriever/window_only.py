"""A control: the stages read only the windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from gsm.layers.attended import Attended
from gsm.layers.costs import AttentionCost, LayerCost
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm.slots.retriever.base import Retriever


class WindowOnly(Retriever):
    """Select no entries, so that a stage reads only the window of its encoder layer."""

    def work(self, bank: AttentionCost) -> LayerCost:
        """Return a cost of zero."""
        read = replace(bank, limit=0)
        return LayerCost(looks=(read,), bank=read)

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Return an empty selection."""
        return Selection(None), cache
