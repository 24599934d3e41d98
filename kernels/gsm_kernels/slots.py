"""Masks of the slots of a bank or a cache that a row sees, and gathers of the slots that it selects."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(slots: int, first_BR: Tensor, last_BR: Tensor) -> Tensor:
    """Return which slots are in a row's range [first, last), bool [B,R,F]."""
    slot_F = torch.arange(slots, device=first_BR.device)
    return (slot_F >= first_BR[..., None]) & (slot_F < last_BR[..., None])


def slots_visible(slots: int, first_BR: Tensor, last_BR: Tensor, pool_BRN: Tensor | None, block: int) -> Tensor:
    """Return which slots a row may select, bool [B,R,F]: those in [first, last), and in its pool if there are pools.

    Args:
        slots: F.
        first_BR, last_BR: the range of each row.
        pool_BRN: numbers of the blocks in each row's pool, -1 for none; None: no pools.
        block: slots per block; block n begins at slot first + n * block.
    """
    if pool_BRN is None:
        return visible(slots, first_BR, last_BR)
    return visible_blocks(slots, first_BR, last_BR, pool_BRN[:, :, None], block)[:, :, 0]


def visible_blocks(slots: int, first_BR: Tensor, last_BR: Tensor, chosen_BRGN: Tensor, block: int) -> Tensor:
    """Return which slots are in [first, last) and in the chosen blocks of a row and group, bool [B,R,G,F].

    Block n begins at slot first + n * block; -1 is no block.
    """
    blocks = slots // block + 1
    member = torch.zeros(*chosen_BRGN.shape[:3], blocks + 1, dtype=torch.bool, device=chosen_BRGN.device)
    member.scatter_(3, torch.where(chosen_BRGN < 0, blocks, chosen_BRGN.clamp(max=blocks)), True)
    slot_F = torch.arange(slots, device=first_BR.device)
    block_BRF = (slot_F - first_BR[..., None]).div(block, rounding_mode="floor").clamp_(0, blocks - 1)
    seen_BRF = visible(slots, first_BR, last_BR)
    return member.gather(3, block_BRF[:, :, None].expand(-1, -1, member.shape[2], -1)) & seen_BRF[:, :, None]


def gather_slots(bank_BFX: Tensor, index_BRK: Tensor) -> Tensor:
    """Return the entries at an index, [B*R,K,X]. For -1, return slot 0, or zeros if the bank is empty: mask these."""
    shape = (index_BRK.shape[:2].numel(), index_BRK.shape[2], bank_BFX.shape[2])
    if bank_BFX.shape[1] == 0:
        return bank_BFX.new_zeros(shape)
    if not bank_BFX.is_contiguous():  # a view of a larger bank's first slots, which `flatten` would copy
        batch = torch.arange(len(bank_BFX), device=bank_BFX.device)[:, None, None]
        return bank_BFX[batch, index_BRK.clamp(min=0)].reshape(shape)
    flat = flat_slots(index_BRK, bank_BFX.shape[1])
    return bank_BFX.flatten(0, 1).index_select(0, flat).view(shape)


def flat_slots(index_BRK: Tensor, slots: int) -> Tensor:
    """Return the flattened index [B*R*K] into a bank [B*F,...]; -1 becomes slot 0 of its sequence."""
    slot_BRK = index_BRK.clamp(min=0)
    if len(index_BRK) > 1:
        slot_BRK = slot_BRK + torch.arange(len(index_BRK), device=index_BRK.device)[:, None, None] * slots
    return slot_BRK.flatten()
