"""What mixers with slots have in common: each head knows the past as M keys and values, which a softmax reads."""

from __future__ import annotations

from abc import abstractmethod

import torch.nn.functional as F
from torch import Tensor

from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence
from gsm_kernels import slot_attention


class SlotMemory(Recurrence):
    """M slots for every head, each a key and a value of width C, of which a token replaces a share:
    ``K_m <- a_m K_m + (1 - a_m) k_t``, values likewise; ``out_t = silu(sum_m softmax_m(K_m . q_t) V_m)``. Query, key
    and value are SiLU. A variant says what is left of each slot (``slot_decay``).

    Args:
        shape: shared widths.
        name: what its taps are called.
        convolution: tokens that the short convolution sees; 1: there is none.
        slots: slots of a head (M); None: as many as it has channels.

    Raises:
        ValueError: for slots below 1.
    """

    def __init__(self, shape: Shape, *, name: str, convolution: int, slots: int | None):
        super().__init__(shape, name=name, convolution=convolution)
        self.slots = shape.entry_dim if slots is None else slots
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1 for each head, got {slots}")
        self.kept, self.decays = (self.slots, 2 * shape.entry_dim), self.slots

    def recur(
        self,
        query_BTHC: Tensor,
        key_BTHC: Tensor,
        value_BTHC: Tensor,
        x_BTD: Tensor,
        position_BT: Tensor,
        state_BHRC: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What the slots answer to every query, [B, T, H, C], and the slots after the call, [B, H, M, 2 C]."""
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
        """log a, what is left of each slot, [B, T, H, M], in at least float32."""

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """SiLU."""
        return F.silu(x_BTHC)

    def activate(self, value_BTC: Tensor) -> Tensor:
        """SiLU."""
        return F.silu(value_BTC)
