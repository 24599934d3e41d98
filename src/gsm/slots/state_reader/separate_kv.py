"""Keys and values of their own: what a row looks for in an entry need not be what it takes from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsm.layers.attended import SharedState, StatePart
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles
from gsm.slots.state_reader.base import StateAttention, StateReader


class SeparateKV(StateReader):
    """Two parts: keys, rotated by their positions, and values, which are not. An entry of the same M takes twice the
    bytes; ``model.state_size`` at half makes them equal."""

    parts = (StatePart("key"), StatePart("value", rotated=False))

    def layer(self, shape: Shape, *, layer: int, layers: int, **common: Any) -> StateAttention:
        """Reads keys and values."""
        return SeparateKVAttention(shape, **common)


class SeparateKVAttention(StateAttention):
    """``out = sum_i softmax_i(RoPE_t q . key_i / sqrt(C)) value_i``, with the sink in the denominator.

    The kernels know entries that are key and value at once. An entry of width 2 C, ``[value, key]``, is that for a
    query ``[0, q]``: the values do not count in the logits, and of what is mixed the first half is taken. The last
    channels are those that are rotated, so values stay as they are. It computes twice the products that the equation
    needs.
    """

    parts_per_entry = 2

    def mix(self, query_BRHC: Tensor, state: SharedState, position_BR: Tensor, angles: Angles) -> Tensor:
        """What the rows take from the values, [B, R, H, C]."""
        wide_BRHC = torch.cat([torch.zeros_like(query_BRHC), query_BRHC * 2**0.5], dim=-1)  # logits over sqrt(2 C)
        state_BEC = torch.cat([state.parts["value"], state.parts["key"]], dim=-1)
        return self.attend(wide_BRHC, state_BEC, position_BR, angles)[..., : query_BRHC.shape[-1]]
