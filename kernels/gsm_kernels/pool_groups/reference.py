"""Plain PyTorch pooling of groups of tokens: gather, softmax over the members, weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32


def pool_groups(value_BSC: Tensor, gate_BSC: Tensor | None, end_BF: Tensor, ratio: int) -> Tensor:
    """See `gsm_kernels.pool_groups`."""
    if value_BSC.shape[1] == 0:
        return value_BSC.new_zeros(*end_BF.shape, value_BSC.shape[2])
    member_BFM = end_BF[..., None] + torch.arange(1 - ratio, 1, device=end_BF.device)
    value_BFMC = at_least_float32(_gather(value_BSC, member_BFM))
    if gate_BSC is None or ratio == 1:
        pooled_BFC = value_BFMC[:, :, 0]
    else:
        weight_BFMC = torch.softmax(at_least_float32(_gather(gate_BSC, member_BFM)), 2)
        pooled_BFC = (weight_BFMC * value_BFMC).sum(2)
    return pooled_BFC.masked_fill(end_BF[..., None] < 0, 0).to(value_BSC.dtype)


def _gather(x_BSC: Tensor, member_BFM: Tensor) -> Tensor:
    batch, stream, channels = x_BSC.shape
    flat = member_BFM.clamp(min=0) + torch.arange(batch, device=x_BSC.device)[:, None, None] * stream
    return x_BSC.reshape(-1, channels).index_select(0, flat.flatten()).view(*member_BFM.shape, channels)
