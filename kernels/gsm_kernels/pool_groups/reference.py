"""Plain PyTorch pooling of groups of tokens: gather, softmax over the members, weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32, in_dtype
from ..slots import flat_slots


def pool_groups(value_BSC: Tensor, gate_BSC: Tensor | None, end_BF: Tensor, ratio: int) -> Tensor:
    """See `gsm_kernels.pool_groups`."""
    if value_BSC.shape[1] == 0:
        return value_BSC.new_zeros(*end_BF.shape, value_BSC.shape[2])
    end_BF1 = end_BF[..., None]
    member_BFM = end_BF1 if ratio == 1 else end_BF1 + torch.arange(1 - ratio, 1, device=end_BF.device)
    place = flat_slots(member_BFM, value_BSC.shape[1])
    shape = (*member_BFM.shape, value_BSC.shape[2])
    value_BFMC = at_least_float32(value_BSC.reshape(-1, shape[3]).index_select(0, place).view(shape))
    if gate_BSC is None or ratio == 1:
        pooled_BFC = value_BFMC[:, :, 0]
    else:
        gate_BFMC = at_least_float32(gate_BSC.reshape(-1, shape[3]).index_select(0, place).view(shape))
        pooled_BFC = (torch.softmax(gate_BFMC, 2) * value_BFMC).sum(2)
    return in_dtype(pooled_BFC.masked_fill(end_BF1 < 0, 0), value_BSC.dtype)
