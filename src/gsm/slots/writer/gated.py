"""A writer with a learned gate on each channel of the retrieved history."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gsm.layers.linear import Linear
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Shape
from gsm.observe import tap
from gsm.slots.writer.base import StateWriter, retrieved


class Gated(StateWriter):
    """z = e + g * r with g = sigmoid(W RMSNorm([e ; r]) + b), one gate per channel of the model.

    W starts at zero, so all gates start at sigmoid(b). They start mostly open, because the gradient of the stages is
    multiplied by the gates. The input is normed, as that of a stage's query is, because the encoder's output has no
    fixed scale.

    Args:
        shape, common: as in ``StateWriter``.
        bias: initial b; 2.0 gives gates of 0.88.
    """

    needs_stages = True

    def __init__(self, shape: Shape, *, bias: float, **common: Any):
        super().__init__(shape, **common)
        self.gate_norm = RMSNorm(2 * shape.dim)
        self.gate = Linear(2 * shape.dim, shape.dim, gain=0.0)
        self.bias = nn.Parameter(torch.full((shape.dim,), float(bias)))

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Add the gated sum of all increments to the encoder's output."""
        retrieved_BTD = retrieved(increments)
        both_BTU = torch.cat([encoded_BTD, retrieved_BTD], dim=-1)
        gate_BTD = tap("state/gate", torch.sigmoid(self.gate(self.gate_norm(both_BTU)) + self.bias))
        return encoded_BTD + gate_BTD * retrieved_BTD
