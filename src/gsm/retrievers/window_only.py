"""A control: the stages bring nothing from beyond the windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gsm.memory.view import View
from gsm.nn.rope import Angles
from gsm.nn.search import Found
from gsm.retrievers.base import Retriever


class WindowOnly(Retriever):
    """Selects nothing: a stage reads the window of its layer alone."""

    @property
    def reads(self) -> int:
        """No entry."""
        return 0

    def forward(self, x_BRU: Tensor, view: View, position_BR: Tensor, angles: Angles, own: Any) -> tuple[Found, Any]:
        """Nothing."""
        return Found(None), own
