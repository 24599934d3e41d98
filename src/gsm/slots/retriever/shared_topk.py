"""The paper's retriever: a stage reads the entries that its encoder layer has selected (section 3.1)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gsm.layers.attended import Attended
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm.slots.retriever.base import Retriever


class SharedTopK(Retriever):
    """Reuse the Top-K of the encoder layer. There are no parameters; widths and ``top_k`` are unused."""

    follows_encoder = True

    def forward(
        self, x_BRU: Tensor, attended: Attended, position_BR: Tensor, angles: Angles, cache: Any
    ) -> tuple[Selection, Any]:
        """Return the encoder layer's selection."""
        return Selection.by_layer(attended), cache
