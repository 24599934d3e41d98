"""The recurrence of `gsm_kernels.delta_rule`, token by token, as in its equations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32
from .inputs import Inputs


def delta_rule(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.delta_rule`."""
    query, key, value = (at_least_float32(x) for x in inputs[:3])
    state, outs = at_least_float32(inputs.state_BHCC), []
    for t in range(query.shape[1]):
        before, live_B111 = state, inputs.live_BT[:, t, None, None, None]
        state = state.masked_fill(inputs.start_BT[:, t, None, None, None], 0)
        if inputs.log_decay_BTH is not None:
            state = state * at_least_float32(inputs.log_decay_BTH[:, t, :, None, None]).exp()
        if inputs.channel_decay_BTHC is not None:
            state = state * at_least_float32(inputs.channel_decay_BTHC[:, t, :, :, None]).exp()
        write_BHC = value[:, t]
        if inputs.beta_BTH is not None:
            write_BHC = at_least_float32(inputs.beta_BTH[:, t, :, None]) * (write_BHC - _read(state, key[:, t]))
        state = torch.where(live_B111, state + key[:, t, :, :, None] * write_BHC[:, :, None], before)
        outs.append(torch.where(live_B111[..., 0], inputs.scale * _read(state, query[:, t]), 0))
    return torch.stack(outs, dim=1).to(inputs.query_BTHC.dtype), state


def _read(state_BHCC: Tensor, x_BHC: Tensor) -> Tensor:
    """Return S^T x as a sum, because autocast would round the gradients of a matrix product."""
    return (x_BHC[..., None] * state_BHCC).sum(dim=-2)
