"""A state for each group of decoder layers: what the first ones want of the past need not be what the last ones do."""

from __future__ import annotations

from typing import Any

from gsm.layers.attended import StatePart
from gsm.layers.projections import Shape
from gsm.slots.state_reader.base import StateAttention, StateReader


class PerGroup(StateReader):
    """G states, written by projections of their own from the same z; the decoder's layers read them in G runs of
    neighbours. ``model.state_size`` divided by G makes them as large as one.

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
        """Reads the state of its group."""
        if self.groups > layers:
            raise ValueError(f"state_reader.groups is {self.groups}, more than the {layers} decoder layers; say fewer")
        part = self.parts[(layer - 1) * self.groups // layers].name
        return StateAttention(shape, part=part, **common)
