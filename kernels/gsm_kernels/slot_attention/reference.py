"""The recurrence of `gsm_kernels.slot_attention`, token by token, as in its equations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32
from .inputs import Inputs


def slot_attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.slot_attention`."""
    query, key, value, write, log_decay = (at_least_float32(x) for x in inputs[:5])
    entry, state, outs = torch.cat((key, value), dim=-1), at_least_float32(inputs.state_BHMU), []
    for t in range(query.shape[1]):
        before, live_B111 = state, inputs.live_BT[:, t, None, None, None]
        state = state.masked_fill(inputs.start_BT[:, t, None, None, None], 0) * log_decay[:, t, :, :, None].exp()
        state = torch.where(live_B111, state + write[:, t, :, :, None] * entry[:, t, :, None], before)
        # Sums, because autocast would round the gradients of matrix products.
        keys_BHMC, values_BHMC = state.chunk(2, dim=-1)
        weight_BHM = (inputs.scale * (keys_BHMC * query[:, t, :, None]).sum(-1)).softmax(-1)
        outs.append(torch.where(live_B111[..., 0], (weight_BHM[..., None] * values_BHMC).sum(-2), 0))
    return torch.stack(outs, dim=1).to(inputs.query_BTHC.dtype), state
