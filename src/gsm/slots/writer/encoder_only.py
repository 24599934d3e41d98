"""A control: the state holds the encoder's output alone, and what the stages retrieve is lost."""

from __future__ import annotations

from torch import Tensor

from gsm.slots.writer.base import StateWriter


class EncoderOnly(StateWriter):
    """z = e. With or without stages, the model computes the same."""

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """The encoder's output, unchanged."""
        return encoded_BTD
