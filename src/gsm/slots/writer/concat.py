"""A writer that concatenates the encoder's output and the retrieved history, and projects them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsm.layers.linear import Linear
from gsm.layers.projections import Shape
from gsm.slots.writer.base import StateWriter, retrieved


class Concat(StateWriter):
    """z = W [e ; r] with W = [1 1] + V, where 1 is the identity matrix and V starts at zero.

    So training starts at the paper's writer, z = e + r, and weight decay pulls towards it. A random W would first have
    to learn the identity, and weight decay would pull z to zero.

    Args:
        shape, common: as in ``StateWriter``.
    """

    needs_stages = True

    def __init__(self, shape: Shape, **common: Any):
        super().__init__(shape, **common)
        self.correction = Linear(2 * shape.dim, shape.dim, gain=0.0)

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Project the encoder's output and the sum of all increments."""
        retrieved_BTD = retrieved(increments)
        both_BTU = torch.cat([encoded_BTD, retrieved_BTD], dim=-1)
        return encoded_BTD + retrieved_BTD + self.correction(both_BTU)
