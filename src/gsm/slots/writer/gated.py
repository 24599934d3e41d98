"""A gate that decides, channel by channel, how much of the retrieval enters the state."""

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
    """z = e + g * r with g = sigmoid(W RMSNorm([e ; r]) + b), as wide as the model.

    W starts at zero, so that at first all gates are sigmoid(b). They start mostly open: a stage's gradient passes its
    gate, and a stage behind a closed one would hardly learn what there is to let through. The input is normed like
    that of a stage's query, for the streams of the encoder have no fixed scale.

    Args:
        shape, common: as for every writer.
        bias: b at the start; 2.0 opens the gates to 0.88.
    """

    needs_stages = True

    def __init__(self, shape: Shape, *, bias: float, **common: Any):
        super().__init__(shape, **common)
        self.gate_norm = RMSNorm(2 * shape.dim)
        self.gate = Linear(2 * shape.dim, shape.dim, gain=0.0)
        self.bias = nn.Parameter(torch.full((shape.dim,), float(bias)))

    def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
        """Adds as much of the sum of all increments as the gates let through."""
        retrieved_BTD = retrieved(increments)
        both_BTU = torch.cat([encoded_BTD, retrieved_BTD], dim=-1)
        gate_BTD = tap("state/gate", torch.sigmoid(self.gate(self.gate_norm(both_BTU)) + self.bias))
        return encoded_BTD + gate_BTD * retrieved_BTD
