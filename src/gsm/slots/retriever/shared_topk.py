"""The paper's retriever: a stage reads what the encoder layer has selected (section 3.1)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gsm.layers.attended import Attended
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm.slots.retriever.base import Retriever


class SharedTopK(Retriever):
    """Reuses the Top-K of the encoder layer; owns no parameters, and uses none of the widths."""

    follows_encoder = True

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """The layer's own selection."""
        return Selection.by_layer(attended), cache
