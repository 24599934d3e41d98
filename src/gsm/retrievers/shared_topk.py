"""The paper's retriever: a stage reads what the encoder layer has selected (section 3.1)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gsm.memory.view import View
from gsm.nn.rope import Angles
from gsm.nn.search import Found
from gsm.retrievers.base import Retriever


class SharedTopK(Retriever):
    """Reuses the Top-K of the encoder layer; owns no parameters, and uses none of the widths."""

    follows_encoder = True

    def forward(self, x_BRU: Tensor, view: View, position_BR: Tensor, angles: Angles, own: Any) -> tuple[Found, Any]:
        """The layer's own selection."""
        return Found.by_layer(view), own
