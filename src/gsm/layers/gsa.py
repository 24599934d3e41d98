"""GSA (Zhang et al., 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling"): a softmax over slots,
with every token written to all slots."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gsm.layers.linear import Linear
from gsm.layers.projections import Shape
from gsm.layers.slot_memory import SlotMemory
from gsm.shapes import promoted


class GSA(SlotMemory):
    """``SlotMemory`` with the decay ``a_t = sigmoid(W x_t)^(1 / damping)``, one number per slot and token.

    Args:
        shape: widths that all attention layers share.
        geometry: unused.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        convolution: width in tokens of the short convolution; 1: no convolution, as in the original.
        slots: slots of a head (M); None: its number of channels.
        damping: divisor of the logarithm of the decay; above 1, slots forget more slowly than with the sigmoid alone.

    Raises:
        ValueError: if ``slots`` is below 1, or ``damping`` not above 0.
    """

    def __init__(
        self, shape: Shape, *, geometry: object, name: str, convolution: int, slots: int | None, damping: float
    ):
        super().__init__(shape, name=name, convolution=convolution, slots=slots)
        if damping <= 0:
            raise ValueError(f"damping must be above 0, got {damping}")
        self.damping = damping
        self.decay = Linear(shape.dim, shape.heads * self.slots)

    def slot_decay(self, x_BTD: Tensor) -> Tensor:
        """Return log a, [B, T, H, M], in at least float32."""
        return F.logsigmoid(promoted(self.decay(x_BTD))).unflatten(-1, (self.heads, self.slots)) / self.damping
