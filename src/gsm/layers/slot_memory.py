"""The common part of mixers with slots: each head stores the past as M keys and values, read by softmax attention."""

from __future__ import annotations

from abc import abstractmethod

import torch.nn.functional as F
from torch import Tensor

from gsm.errors import within
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence
from gsm.layers.slot_attention import slot_attention


class SlotMemory(Recurrence):
    """M slots per head, each a key and a value of width C. A token replaces a part of each slot:
    ``K_m <- a_m K_m + (1 - a_m) k_t``, and the same for values; ``out_t = silu(sum_m softmax_m(K_m . q_t) V_m)``. SiLU
    is applied to queries, keys and values, and one norm to the outputs of all heads together. A subclass defines the
    decay a_m (``slot_decay``).

    Args:
        shape: widths that all attention layers share.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        convolution: width in tokens of the short convolution; 1: no convolution.
        slots: slots of a head (M); None: its number of channels.

    Raises:
        ValueError: if ``slots`` is not in [1, 65536].
    """

    def __init__(self, shape: Shape, *, name: str, convolution: int, slots: int | None):
        super().__init__(shape, name=name, convolution=convolution)
        self.slots = shape.entry_dim if slots is None else slots
        within(1, 65536, slots=self.slots)
        self.state_shape, self.decays = (self.slots, 2 * shape.entry_dim), self.slots
        self.norm = RMSNorm(shape.heads * shape.entry_dim)

    def recur(
        self,
        query_BTHC: Tensor,
        key_BTHC: Tensor,
        value_BTHC: Tensor,
        x_BTD: Tensor,
        position_BT: Tensor,
        state_BHRC: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of every query, [B, T, H, C], and the slots after the call, [B, H, M, 2 C]."""
        log_decay_BTHM = self.slot_decay(x_BTD)
        out_BTHC, state_BHMU = slot_attention(
            query_BTHC,
            key_BTHC,
            value_BTHC,
            -log_decay_BTHM.expm1(),
            log_decay_BTHM,
            position_BT == 0,
            position_BT >= 0,
            state_BHRC,
        )
        return F.silu(out_BTHC), state_BHMU

    @abstractmethod
    def slot_decay(self, x_BTD: Tensor) -> Tensor:
        """Return log a, the logarithm of the decay factor of each slot, [B, T, H, M], in at least float32."""

    def normed(self, out_BRHC: Tensor) -> Tensor:
        """Norm the outputs of all heads together."""
        return self.norm(out_BRHC.flatten(-2)).view_as(out_BRHC)

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """Apply SiLU."""
        return F.silu(x_BTHC)

    def activate(self, value_BTC: Tensor) -> Tensor:
        """Apply SiLU."""
        return F.silu(value_BTC)
