"""What a layer remembers between calls, as immutable values: extending a store returns a new one.

Purity is what makes recomputation of activations harmless and a prefix forkable. Every store answers to the same few
methods, so that a mixer cannot tell training (``FORGET``, nothing is kept) from generation (``Window`` and
``Column``, which grow).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gsm.memory.slots import Slots


class WindowStore(Protocol):
    """The most recent entries of a layer."""

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, WindowStore]:
        """Returns stored and new entries in stream order, ``seen_BEC``, and the store after them."""
        ...


class ColumnStore(Protocol):
    """One value for every slot of a bank."""

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, ColumnStore]:
        """Returns the values of all slots, ``value_BFC``, and the store after them."""
        ...


class Forget:
    """The store of training: the new entries are all there is, and nothing is kept."""

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, Forget]:
        """The new entries, unchanged."""
        return new_BTC, self

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, Forget]:
        """The new values, unchanged: without a memory the new slots are all slots."""
        return new_BGC, self


FORGET = Forget()


@dataclass(frozen=True)
class Window:
    """The last ``size`` entries, as a compact copy.

    After a pruned prefill the stored entries and the next new ones may lie apart in the stream; no row reaches across
    that gap, because a layer always writes the ``size`` entries before the first row that it will be asked for.
    """

    kind: str
    size: int
    entry_BEC: Tensor

    @staticmethod
    def empty(kind: str, size: int, like_BC: Tensor) -> Window:
        """A window without entries, for as many sequences and of the width, dtype and device of ``like_BC``."""
        return Window(kind, size, like_BC.new_empty(like_BC.shape[0], 0, like_BC.shape[1]))

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, Window]:
        """Stored entries followed by the new ones, and the last ``size`` of them as the next window."""
        seen_BEC = torch.cat([self.entry_BEC, new_BTC.to(self.entry_BEC.dtype)], dim=1)
        keep = min(self.size, seen_BEC.shape[1])
        return seen_BEC, replace(self, entry_BEC=seen_BEC[:, seen_BEC.shape[1] - keep :].detach().clone())


@dataclass(frozen=True)
class Column:
    """One value per slot of a bank, growing with it. Slots that a sequence of the batch has not reached yet hold
    zeros."""

    kind: str
    value_BFC: Tensor

    @staticmethod
    def empty(kind: str, like_BC: Tensor) -> Column:
        """A column without slots, for as many sequences and of the width, dtype and device of ``like_BC``."""
        return Column(kind, like_BC.new_empty(like_BC.shape[0], 0, like_BC.shape[1]))

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, Column]:
        """Writes the new values behind the slots that each sequence has filled so far."""
        batch, _, width = new_BGC.shape
        total, stored = slots.total, self.value_BFC.shape[1]
        if new_BGC.shape[1] == 0:
            return self.value_BFC, self
        if batch == 1:  # a single sequence uses all of its new slots
            value_BFC = torch.cat([self.value_BFC, new_BGC.to(self.value_BFC.dtype)], dim=1)
            return value_BFC, replace(self, value_BFC=value_BFC.detach())
        # One slot more than there are: unused new values are written there and dropped.
        table_BFC = self.value_BFC.new_zeros(batch, total + 1, width)
        table_BFC[:, :stored] = self.value_BFC
        used_BG = slots.end_BG >= 0
        target_BG = slots.before_B[:, None] + torch.arange(new_BGC.shape[1], device=new_BGC.device)
        target_BGC = torch.where(used_BG, target_BG, total)[..., None].expand(-1, -1, width)
        value_BFC = table_BFC.scatter(1, target_BGC, new_BGC.to(table_BFC.dtype))[:, :total].contiguous()
        return value_BFC, replace(self, value_BFC=value_BFC.detach())
