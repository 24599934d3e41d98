"""The paper's reader: every decoder layer reads the same M entries with a new query (section 3.3)."""

from __future__ import annotations

from typing import Any

from gsm.layers.projections import Shape
from gsm.slots.state_reader.base import StateAttention, StateReader


class Shared(StateReader):
    """One state for all decoder layers; each entry is both key and value."""

    def layer(self, shape: Shape, *, layer: int, layers: int, **common: Any) -> StateAttention:
        """Build the attention to the last M entries."""
        return StateAttention(shape, **common)
