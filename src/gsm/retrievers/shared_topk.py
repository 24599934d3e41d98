"""The paper's retriever: a stage reads what the encoder layer has selected (section 3.1)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gsm.memory.view import View
from gsm.nn.attention import Shape
from gsm.nn.reader import Found
from gsm.nn.rope import Angles
from gsm.retrievers.base import Retriever


class SharedTopK(Retriever):
    """Reuses the Top-K of the encoder layer; owns no parameters.

    Args:
        dim_in: width of the stage's query input (unused).
        shape: shared widths (unused).
        top_k: selected entries (unused: the layer has decided).
    """

    follows_encoder = True

    def __init__(self, dim_in: int, shape: Shape, *, top_k: int):
        super().__init__()

    def forward(self, x_BRU: Tensor, view: View, angles: Angles, own: Any) -> tuple[Found, Any]:
        """The layer's own selection."""
        return Found(view.chosen_BRK), own
