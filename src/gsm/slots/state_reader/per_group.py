"""A state for each group of decoder layers, because lower and upper layers may need different information about the
past."""

from __future__ import annotations

from typing import Any

from gsm.layers.attended import StatePart
from gsm.layers.projections import Shape
from gsm.slots.state_reader.base import StateAttention, StateReader


class PerGroup(StateReader):
    """G states, written by separate projections of the same z; each of G groups of consecutive decoder layers reads
    one. With ``model.state_size`` divided by G, they take as many bytes as a single state.

    Args:
        groups: number of groups (G).

    Raises:
        ValueError: if ``groups`` is below 1 or above the number of decoder layers.
    """

    def __init__(self, groups: int):
        if groups < 1:
            raise ValueError(f"state_reader.groups must be at least 1, got {groups}")
        self.groups = groups
        self.parts = tuple(StatePart(f"group{group}") for group in range(1, groups + 1))

    def layer(self, shape: Shape, *, layer: int, layers: int, **common: Any) -> StateAttention:
        """Build the attention to the state of the layer's group."""
        if self.groups > layers:
            raise ValueError(
                f"state_reader.groups must be at most {layers}, the number of decoder layers, got {self.groups}"
            )
        part = self.parts[(layer - 1) * self.groups // layers].name
        return StateAttention(shape, part=part, **common)
