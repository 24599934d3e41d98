"""GSA (Zhang et al., 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling"): a softmax over slots
that every token is written to."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gsm.layers.linear import Linear
from gsm.layers.projections import Shape
from gsm.layers.slot_memory import SlotMemory
from gsm.shapes import promoted


class GSA(SlotMemory):
    """Slots of which a token leaves ``a_t = sigmoid(W x_t)^(1 / damping)``, a number for each slot.

    Args:
        shape: shared widths.
        geometry: not needed.
        name: what its taps are called.
        convolution: tokens that the short convolution sees; 1: there is none, as in the original.
        slots: slots of a head (M); None: as many as it has channels.
        damping: how much slower slots forget than a sigmoid says.

    Raises:
        ValueError: for slots or a damping that cannot be.
    """

    def __init__(
        self, shape: Shape, *, geometry: object, name: str, convolution: int, slots: int | None, damping: float
    ):
        super().__init__(shape, name=name, convolution=convolution, slots=slots)
        if damping <= 0:
            raise ValueError(f"damping must lie above 0, got {damping}")
        self.damping = damping
        self.decay = Linear(shape.dim, shape.heads * self.slots)

    def slot_decay(self, x_BTD: Tensor) -> Tensor:
        """log a, [B, T, H, M], in at least float32."""
        return F.logsigmoid(promoted(self.decay(x_BTD))).unflatten(-1, (self.heads, self.slots)) / self.damping
