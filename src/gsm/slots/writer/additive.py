"""The paper's writer: what the encoder says plus what the stages retrieved (equation 11)."""

from __future__ import annotations

from torch import Tensor

from gsm.slots.writer.base import StateWriter, retrieved


class Additive(StateWriter):
    """z = e + r, where r is the sum of the stages' increments."""

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Adds every increment to the encoder's output."""
        return encoded_BTD + retrieved(increments) if increments else encoded_BTD
