"""A control: the state holds only the stages' increments; the encoder's output is discarded."""

from __future__ import annotations

from torch import Tensor

from gsm.slots.writer.base import StateWriter, retrieved


class RetrievalOnly(StateWriter):
    """z = r. The decoder also starts from z, so it gets only what the stages retrieve."""

    needs_stages = True

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the stages' increments."""
        return retrieved(increments)
