"""The paper's writer: the sum of the encoder's output and the stages' increments (equation 11)."""

from __future__ import annotations

from torch import Tensor

from gsm.slots.writer.base import StateWriter, retrieved


class Additive(StateWriter):
    """z = e + r, where r is the sum of the stages' increments."""

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Add every increment to the encoder's output."""
        return encoded_BTD + retrieved(increments) if increments else encoded_BTD
