"""A control: the state holds what the stages retrieve alone, and the encoder's output is lost."""

from __future__ import annotations

from torch import Tensor

from gsm.slots.writer.base import StateWriter, retrieved


class RetrievalOnly(StateWriter):
    """z = r. The decoder starts from r too: all that it knows of a token has come through the stages."""

    needs_stages = True

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """The sum of the stages' increments."""
        return retrieved(increments)
