"""A state for each group of decoder layers, because lower and upper layers may need different information of the
past."""

from __future__ import annotations

from typing import Any

from gsm.layers.attended import StatePart
from gsm.layers.projections import Shape
from gsm.slots.state_reader.base import StateAttention, StateReader


class PerGroup(StateReader):
    """G states, written by separate projections of the same z. Each of G groups of consecutive layers reads a state.
    With ``model.state_size`` divided by G, they take the bytes of a single state.

    Args:
        groups: G.

    Raises:
        ValueError: for fewer groups than 1, or more than decoder layers.
    """

    def __init__(self, groups: int):
        if groups < 1:
            raise ValueError(f"state_reader.groups must be at least 1, got {groups}")
        self.groups = groups
        self.parts = tuple(StatePart(f"group{group}") for group in range(1, groups + 1))

    def layer(self, shape: Shape, *, layer: int, layers: int, **common: Any) -> StateAttention:
        """Build the attention to the state of the layer's group."""
        if self.groups > layers:
            raise ValueError(f"state_reader.groups must be at most {layers}, the decoder layers, got {self.groups}")
        part = self.parts[(layer - 1) * self.groups // layers].name
        return StateAttention(shape, part=part, **common)
