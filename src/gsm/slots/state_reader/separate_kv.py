"""Separate keys and values in the shared state, instead of entries that are both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsm.layers.attended import SharedState, StatePart
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles
from gsm.slots.state_reader.base import StateAttention, StateReader


class SeparateKV(StateReader):
    """The state has two parts: keys, rotated by their positions, and values, which are not rotated. This doubles the
    bytes of the state; with half of ``model.state_size``, they are the same."""

    parts = (StatePart("key"), StatePart("value", rotated=False))

    def layer(self, shape: Shape, *, layer: int, layers: int, **common: Any) -> StateAttention:
        """Build the attention to keys and values."""
        return SeparateKVAttention(shape, **common)


class SeparateKVAttention(StateAttention):
    """``out = sum_i softmax_i(RoPE_t q . key_i / sqrt(C)) value_i``, with the sink in the denominator.

    The kernels support only entries that are both key and value. So the entry is ``[value, key]`` of width 2 C and the
    query is ``[0, q]``: the values do not enter the logits, and the first half of the output is used. Only the last
    channels are rotated, so the values are not. This computes twice the products that the equation needs.
    """

    parts_per_entry = 2

    def mix(self, query_BRHC: Tensor, state: SharedState, position_BR: Tensor, angles: Angles) -> Tensor:
        """Return the weighted sum of values, [B, R, H, C]."""
        # The kernel divides logits by sqrt(2 C), hence the factor sqrt(2).
        wide_BRHC = torch.cat([torch.zeros_like(query_BRHC), query_BRHC * 2**0.5], dim=-1)
        state_BEC = torch.cat([state.parts["value"], state.parts["key"]], dim=-1)
        return self.attend(wide_BRHC, state_BEC, position_BR, angles)[..., : query_BRHC.shape[-1]]
