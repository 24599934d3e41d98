"""The plan of a bank for one call: finished groups of tokens, their slots, and the slots that each new token may see.

A bank of ratio m has one slot for every m consecutive tokens of one document. An incomplete group at the end of a
document has none. Slots are numbered in stream order, so the slots visible to a token form one contiguous range that
ends with the newest finished group:

    tokens      a0 a1 a2 a3 a4 | b0 b1 b2          two documents, m = 2
    slots          0     1          2
    last         0  1  1  2  2    2  3  3          slots finished so far
    first        0  0  0  0  0    2  2  2          last - (position + 1) // m
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """The plan for one bank in one call.

    Its shapes follow from the number of new tokens, without synchronising with the device. Only a growing bank
    synchronises, to determine its size.

    Attributes:
        end_BG: int64, index among the new tokens of the last token of each new group; -1 for unused slots, which come
            after the used ones of a sequence.
        position_BG: int64, document-local position of the first token of each new group: its position for RoPE.
        before_B: int64, slots filled before this call.
        last_BT: int64, slots finished up to and including each new token.
        first_BT: int64, first slot of the token's own document that it may see.
        uniform: whether every sequence has filled the same number of slots and uses all new ones; known on the host.
    """

    end_BG: Tensor
    position_BG: Tensor
    before_B: Tensor
    last_BT: Tensor
    first_BT: Tensor
    uniform: bool = False

    @property
    def after_B(self) -> Tensor:
        """Slots filled after this call; a copy, because each bank with this plan has a count of its own."""
        return self.last_BT[:, -1].clone()

    def ends(self, stored: int) -> Tensor:
        """Return ``end_BG`` as indices among ``stored`` earlier tokens and the new ones."""
        return torch.where(self.end_BG < 0, -1, self.end_BG + stored)

    @cached_property
    def growth(self) -> tuple[int, int]:
        """Slots of the longest sequence after this call, and the largest number that one sequence gains.

        Waits for the device.
        """
        after, before = torch.stack([self.last_BT[:, -1], self.before_B]).tolist()
        return max(after), max(new - old for new, old in zip(after, before, strict=True))

    def places(self, spare: int) -> Tensor:
        """Return the slot of each new group, int64 [B, G]; ``spare`` for unused slots."""
        if spare not in self._places:
            index_G = torch.arange(self.end_BG.shape[1], device=self.end_BG.device)
            self._places[spare] = (self.before_B[:, None] + index_G).masked_fill(self.end_BG < 0, spare)
        return self._places[spare]

    @cached_property
    def _places(self) -> dict[int, Tensor]:
        return {}


def every_token(position_BT: Tensor, before_B: Tensor | None) -> Slots:
    """Plan one slot for each new token in stream order; arguments as in ``plan_slots``.

    Padding gets slots too, but sees nothing, and no token sees it.
    """
    batch, length = position_BT.shape
    start_B = position_BT.new_zeros(batch) if before_B is None else before_B
    index_BT = torch.arange(length, device=position_BT.device).expand(batch, -1)
    last_BT = start_B[:, None] + index_BT + 1
    return Slots(index_BT, position_BT, start_B, last_BT, last_BT - (position_BT + 1), uniform=True)


def plan_slots(position_BT: Tensor, ratio: int, before_B: Tensor | None) -> Slots:
    """Plan the slots for new tokens.

    Args:
        position_BT: int64, document-local positions, -1 for padding.
        ratio: tokens in a group (m).
        before_B: int64, slots filled before; None without a memory. With a memory, earlier tokens may have begun a
            group: T new tokens then finish at most ceil(T / m) groups, and without a memory floor(T / m).
    """
    batch, length = position_BT.shape
    finished_BT = (position_BT >= 0) & (position_BT % ratio == ratio - 1)
    rank_BT = finished_BT.cumsum(dim=1)
    start_B = position_BT.new_zeros(batch) if before_B is None else before_B
    last_BT = start_B[:, None] + rank_BT
    new = length // ratio if before_B is None else -(-length // ratio)
    # The index of each token that finishes a group is written to the rank of its group. Other tokens are written to an
    # extra slot, which is cut off.
    target_BT = torch.where(finished_BT, rank_BT - 1, new)
    index_T = torch.arange(length, device=position_BT.device)
    end_BG = position_BT.new_full((batch, new + 1), -1).scatter(1, target_BT, index_T.expand(batch, -1))[:, :new]
    position_BG = position_BT.gather(1, end_BG.clamp(min=0)) - (ratio - 1)
    return Slots(end_BG, position_BG.clamp(min=0), start_B, last_BT, last_BT - (position_BT + 1) // ratio)
