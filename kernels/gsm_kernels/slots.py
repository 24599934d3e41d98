"""Slots of a bank or a cache: which of them a row sees, and fetching those that it has selected."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(first_BR: Tensor, last_BR: Tensor, slots: slice) -> Tensor:
    """Which of these slots lie in a row's range [first, last), bool [B,R,F]."""
    slot_F = torch.arange(slots.start, slots.stop, device=first_BR.device)
    return (slot_F >= first_BR[..., None]) & (slot_F < last_BR[..., None])


def gather_slots(bank_BFX: Tensor, index_BRK: Tensor) -> Tensor:
    """The entries at an index, [B*R,K,X]; slot 0 stands in for none, zeros if there is no slot at all."""
    shape = (index_BRK.shape[:2].numel(), index_BRK.shape[2], bank_BFX.shape[2])
    if bank_BFX.shape[1] == 0:
        return bank_BFX.new_zeros(shape)
    if not bank_BFX.is_contiguous():  # the first slots of larger banks: to fold the batch in would copy all of them
        batch = torch.arange(len(bank_BFX), device=bank_BFX.device)[:, None, None]
        return bank_BFX[batch, index_BRK.clamp(min=0)].reshape(shape)
    flat = flat_slots(index_BRK, bank_BFX.shape[1])
    return bank_BFX.flatten(0, 1).index_select(0, flat).view(shape)


def flat_slots(index_BRK: Tensor, slots: int) -> Tensor:
    """Rows of a bank with its batch folded in; slot 0 stands in for none."""
    batch = torch.arange(index_BRK.shape[0], device=index_BRK.device)[:, None, None]
    return (index_BRK.clamp(min=0) + batch * slots).flatten()
