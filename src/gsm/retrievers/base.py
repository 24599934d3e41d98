"""Which bank entries an aggregation stage may read: the slot ``model/retriever``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gsm.memory.view import View
from gsm.nn.reader import Found
from gsm.nn.rope import Angles


class Retriever(nn.Module):
    """Base of all retrievers; called by a stage once per forward."""

    # Whether this retriever takes over what the encoder layer has selected, so that the layer has to select.
    follows_encoder = False

    def start(self, batch: int, ratio: int) -> Any:
        """An empty memory for ``batch`` sequences, over a bank with a slot for every ``ratio`` tokens (None: this
        retriever keeps nothing)."""
        return None

    def forward(self, x_BRU: Tensor, view: View, angles: Angles, own: Any) -> tuple[Found, Any]:
        """Selects for every row of a stage.

        Args:
            x_BRU: normed input of the stage's query.
            view: what the encoder layer looked at, for the same rows.
            angles: rotation of the rows.
            own: this retriever's memory.

        Returns:
            the selection, and the memory after the call.
        """
        raise TypeError(f"{type(self).__name__} does not define forward(x_BRU, view, angles, own)")
