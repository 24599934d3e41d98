"""The shared state and, in each decoder layer, a small window of entries that the layer makes of the last positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsm.cache.store import Window, WindowStore
from gsm.layers.attended import SharedState
from gsm.layers.block import LayerOutput
from gsm.layers.costs import LayerCost, Store, products
from gsm.layers.projections import Entry, Shape
from gsm.observe import tap
from gsm.shapes import last_rows
from gsm.slots.state_reader.base import StateAttention, StateReader
from gsm.span import Span


class StateAndWindow(StateReader):
    """The paper's state, and in the same softmax the last W_d entries that the decoder layer has written.

    Each decoder layer then has a cache of W_d entries. For equal bytes, make the state smaller by the number of these
    entries.

    Args:
        window: number of entries of the layer's window that a row sees, including its own (W_d).

    Raises:
        ValueError: if ``window`` is below 1.
    """

    def __init__(self, window: int):
        if window < 1:
            raise ValueError(
                f"state_reader.window must be at least 1, got {window}; use state_reader=shared for no window"
            )
        self.window = window

    def layer(self, shape: Shape, *, layer: int, layers: int, **common: Any) -> StateAttention:
        """Build the attention to the state and to the layer's window."""
        return WindowedStateAttention(shape, window=self.window, **common)


class WindowedStateAttention(StateAttention):
    """Attention to the state and to a window of entries that the layer makes.

    Args:
        shape, common: as in ``StateAttention``.
        window: number of entries of the layer's window that a row sees, including its own (W_d).
    """

    def __init__(self, shape: Shape, *, window: int, **common: Any):
        super().__init__(shape, **common)
        self.own_size, self.reach = window, window - 1
        self.window = Entry(shape)

    def start(self, batch: int, kind: str) -> Window:
        """Return an empty window; ``kind`` labels its bytes (``decoder_window``)."""
        like = self.window.projection.weight
        return Window.empty(f"{kind}_window", self.own_size, like.new_empty(batch, like.shape[0]))

    def forward(self, x_BTD: Tensor, span: Span, cache: WindowStore, below: SharedState) -> tuple[Tensor, LayerOutput]:
        """Write the entries of all T positions; attend for the last R of them."""
        angles = self.rope.at(span, x_BTD.dtype)
        own_BFC, cache = cache.extend(self.window(x_BTD, angles))
        own_BFC = tap((self, "window"), own_BFC)
        query_BRHC, _ = self.ask(last_rows(x_BTD, span.rows))
        position_BR = span.row_position_BR
        stored, rows = own_BFC.shape[1], span.rows
        back_K = torch.arange(self.own_size - 1, -1, -1, device=position_BR.device)
        place_RK = torch.arange(stored - rows, stored, device=position_BR.device)[:, None] - back_K
        chosen_BRK = place_RK.where(back_K <= position_BR[..., None], -1)
        state_BEC = below.parts[self.part]
        mixed_BRHC = self.attend(query_BRHC, state_BEC, position_BR, angles.last_rows(rows), own_BFC, chosen_BRK)
        return self.project(mixed_BRHC), LayerOutput(cache, below)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of attention to the state and to the layer's window."""
        near = self.look_cost(self.own_size, nearest=True)
        store = Store(f"{kind}_window", near.width, self.own_size)
        per_token = {"entries": products(self.window)}
        looks = (self.state_cost(), near)
        return LayerCost(self.cost_of_rows(self.window), per_token, looks=looks, stores=(store,))
