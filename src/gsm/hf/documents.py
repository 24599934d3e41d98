"""Convert masks and positions of transformers to ``documents`` of a model. B sequences, T new tokens, U read before.

The masks of all calls, concatenated, must be a valid mask of a single call. Then a text read in pieces has the same
logits as in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.cache.memory import Memory


def joined_mask(input_ids: Tensor, attention_mask: Tensor | None, used: int, before_BU: Tensor | None) -> Tensor | None:
    """Return the mask of all tokens, read before and new, bool [B, U + T]; None if there is no padding.

    Args:
        input_ids: int64 [B, T].
        attention_mask: [B, T] or [B, U + T], 1 for tokens and 0 for padding; None: no padding among the new tokens.
        used: number of tokens read before (U).
        before_BU: bool, the mask of these tokens; None: no padding.

    Raises:
        ValueError: if the mask has another shape or other values, differs from ``before_BU`` for the tokens read
            before, or has padding between the tokens of a row.
    """
    batch, length = input_ids.shape
    if attention_mask is None:
        if before_BU is None:
            return None
        attention_mask = torch.ones_like(input_ids)
    shape = list(attention_mask.shape)
    if shape not in ([batch, length], [batch, used + length]):
        past = f" or, with the tokens read before, [{batch}, {used + length}]" if used else ""
        raise ValueError(
            f"attention_mask must have the shape [{batch}, {length}]{past}, with 0 for padding, got {shape}; the "
            "model is causal without a mask"
        )
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError("attention_mask must be 1 for tokens and 0 for padding, got other values")
    mask_BT = attention_mask.bool()
    past_BU = mask_BT.new_ones(batch, used) if before_BU is None else before_BU
    if mask_BT.shape[1] > length and not torch.equal(mask_BT[:, :used], past_BU):
        raise ValueError(
            f"attention_mask must be unchanged for the {used} tokens read before, got other values for these"
        )
    whole_BT = torch.cat([past_BU, mask_BT[:, mask_BT.shape[1] - length :]], 1)
    if bool(whole_BT.all()):
        return None
    changes_B = (whole_BT[:, 1:] != whole_BT[:, :-1]).sum(1)
    if bool((changes_B - (~whole_BT[:, 0]).long() > 1).any()):
        raise ValueError(
            "attention_mask must have padding only on the left of a row, got padding between tokens; continue with "
            "each row separately"
        )
    return whole_BT


def documents(
    input_ids: Tensor, mask_BT: Tensor | None, position_ids: Tensor | None, memory: Memory | None
) -> Tensor | None:
    """Return the documents of the new tokens, int64 [B, T], -1 for padding; None: one document begins or continues.

    Args:
        input_ids: int64 [B, T].
        mask_BT: bool; None: no padding.
        position_ids: whole numbers that expand to [B, T]. A document begins at each 0, and its positions grow by 1.
            Values at padding are ignored.
        memory: the memory of the tokens read before.

    Raises:
        ValueError: if ``position_ids`` has another shape or dtype, or a position is neither 0 nor 1 more than the
            previous one.
    """
    if mask_BT is None and position_ids is None:  # reading values would synchronise with a GPU
        return None
    token_BT = torch.ones_like(input_ids, dtype=torch.bool) if mask_BT is None else mask_BT
    begins_BT = torch.zeros_like(token_BT)
    if position_ids is not None:
        before_B = torch.full_like(input_ids[:, 0], -1) if memory is None else memory.position_B
        begins_BT = _begins(token_BT, position_ids, before_B)
    if bool(token_BT.all()) and not bool(begins_BT.any()):
        return None
    document_B1 = 0 if memory is None else memory.document_B.clamp(min=0)[:, None]
    return torch.where(token_BT, document_B1 + begins_BT.long().cumsum(1), -1)


def _begins(token_BT: Tensor, position_ids: Tensor, before_B: Tensor) -> Tensor:
    """Return whether a document begins at each token, bool [B, T]; ``before_B`` are the positions of the tokens before
    the first."""
    batch, length = token_BT.shape
    if position_ids.is_floating_point() or list(position_ids.shape) not in ([length], [1, length], [batch, length]):
        raise ValueError(
            f"position_ids must be whole numbers [{batch}, {length}] of the new tokens, got {position_ids.dtype} "
            f"{list(position_ids.shape)}"
        )
    position_BT = torch.where(token_BT, position_ids, -1)
    before_BT = torch.cat([before_B[:, None], position_BT[:, :-1]], 1)
    wrong_BT = token_BT & (position_BT != 0) & (position_BT != before_BT + 1)
    if bool(wrong_BT.any()):
        row, place = wrong_BT.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids must be {int(before_BT[row, place]) + 1}, or 0 where a document begins, at new token "
            f"{place} of row {row}, got {int(position_BT[row, place])}"
        )
    return token_BT & (position_BT == 0) & (before_BT >= 0)
