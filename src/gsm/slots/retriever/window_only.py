"""A control: the stages bring nothing from beyond the windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gsm.layers.attended import Attended
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm.slots.retriever.base import Retriever


class WindowOnly(Retriever):
    """Selects nothing: a stage reads the window of its layer alone."""

    @property
    def reads(self) -> int:
        """No entry."""
        return 0

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Nothing."""
        return Selection(None), cache
