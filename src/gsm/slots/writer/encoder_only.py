"""A control: the state holds only the encoder's output; the stages' increments are discarded."""

from __future__ import annotations

from torch import Tensor

from gsm.slots.writer.base import StateWriter


class EncoderOnly(StateWriter):
    """z = e, so the stages have no effect on the output."""

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Return the encoder's output unchanged."""
        return encoded_BTD
