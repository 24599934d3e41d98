"""A control: the stages bring nothing from beyond the windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from gsm.costs.primitives import AttentionCost, LayerCost
from gsm.layers.attended import Attended
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm.slots.retriever.base import Retriever


class WindowOnly(Retriever):
    """Selects nothing: a stage reads the window of its layer alone."""

    def work(self, bank: AttentionCost) -> LayerCost:
        """What it costs: no entry for any row."""
        read = replace(bank, limit=0)
        return LayerCost(looks=(read,), bank=read)

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Nothing."""
        return Selection(None), cache
