"""What a layer remembers between calls. Every store answers to the same few methods, so that a mixer cannot tell
training from generation, or one kind of memory from the other:

                 what it is                       entries of the past    values of a bank    a recurrence's state
    training     nothing is kept                  ``Forget``             ``Forget``          ``Forget``
    growing      immutable values                 ``Window``             ``Column``          ``State``
    static       buffers that keep their place    ``StaticWindow``       ``StaticColumn``    ``State``
    in pieces    on several ranks                 ``Halo``               ``Shared``          ``Relay``

Those of sequences in pieces are in ``gsm.cache.pieces``. Extending a store returns the next one. Purity is what makes
recomputation of activations harmless and a prefix forkable; a static memory takes the next stores over into its buffers
when the whole call is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gsm.cache.slots import Slots
from gsm.shapes import promoted
from gsm_kernels.device import in_dtype


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


class StateStore(Protocol):
    """The state of a recurrence: all that it knows of the past."""

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """The state to go on from: ``empty_BHRC`` where nothing is kept."""
        ...

    def keep(self, after_BHRC: Tensor, out_BTHC: Tensor) -> tuple[StateStore, Tensor]:
        """The store after a call that left the state ``after_BHRC``, and what that call has read, ``out_BTHC``: where
        states travel, its gradient waits for theirs."""
        ...


class Forget:
    """The store of training: the new entries are all there is, and nothing is kept."""

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, Forget]:
        """The new entries, unchanged."""
        return new_BTC, self

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, Forget]:
        """The new values, unchanged: without a memory the new slots are all slots."""
        return new_BGC, self

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """The empty state: every call begins anew."""
        return empty_BHRC

    def keep(self, after_BHRC: Tensor, out_BTHC: Tensor) -> tuple[Forget, Tensor]:
        """Nothing."""
        return self, out_BTHC


FORGET = Forget()


@dataclass(frozen=True)
class Window:
    """The last ``size`` entries.

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

    def static(self, capacity: int) -> StaticWindow:
        """An empty window of the same kind whose buffer has its full size from the start, whatever the capacity."""
        batch, _, width = self.entry_BEC.shape
        return StaticWindow(self.kind, self.size, self.entry_BEC.new_zeros(batch, self.size, width))

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, Window]:
        """Stored entries followed by the new ones, and the last ``size`` of them as the next window."""
        seen_BEC = torch.cat([self.entry_BEC, in_dtype(new_BTC, self.entry_BEC.dtype)], dim=1)
        keep = min(self.size, seen_BEC.shape[1])
        return seen_BEC, replace(self, entry_BEC=seen_BEC[:, seen_BEC.shape[1] - keep :].detach())


@dataclass(frozen=True)
class StaticWindow(Window):
    """The last ``size`` entries in a buffer of exactly that size, in stream order; before there are so many it begins
    with zeros, which no row sees, because none looks back beyond position 0 of its document.

    Not a ring with a cursor: attention reads stored and new entries in stream order, so a ring would have to be
    unrolled at every read, and shifting a few hundred entries costs no more than that.
    """


@dataclass(frozen=True)
class Column:
    """One value per slot of a bank, growing with it. Slots that a sequence of the batch has not reached yet hold
    zeros.

    Attributes:
        kind: what its bytes are called.
        ratio: tokens per slot (m).
        value_BFC: the values.
    """

    kind: str
    ratio: int
    value_BFC: Tensor

    @staticmethod
    def empty(kind: str, ratio: int, like_BC: Tensor) -> Column:
        """A column without slots, for as many sequences and of the width, dtype and device of ``like_BC``."""
        return Column(kind, ratio, like_BC.new_empty(like_BC.shape[0], 0, like_BC.shape[1]))

    def static(self, capacity: int) -> StaticColumn:
        """An empty column of the same kind with all the slots that ``capacity`` tokens can fill."""
        batch, _, width = self.value_BFC.shape
        return StaticColumn(self.kind, self.ratio, self.value_BFC.new_zeros(batch, capacity // self.ratio + 1, width))

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, Column]:
        """Writes the new values behind the slots that each sequence has filled so far."""
        batch, stored, width = self.value_BFC.shape
        new_BGC = in_dtype(new_BGC, self.value_BFC.dtype)
        if slots.even:
            return self.append(new_BGC)
        total, added = slots.growth
        if added == 0:
            return self.value_BFC, self
        if batch == 1:  # a single sequence uses the first of its new slots
            return self.append(new_BGC[:, :added])
        # One slot more than there are: unused new values are written there and dropped.
        table_BFC = self.value_BFC.new_zeros(batch, total + 1, width)
        table_BFC[:, :stored] = self.value_BFC
        place_BGC = slots.places(total)[:, :added, None].expand(-1, -1, width)
        value_BFC = table_BFC.scatter(1, place_BGC, new_BGC[:, :added])[:, :total].contiguous()
        return value_BFC, replace(self, value_BFC=value_BFC.detach())

    def append(self, new_BGC: Tensor) -> tuple[Tensor, Column]:
        """The new values behind those that are there, in all sequences alike."""
        value_BFC = torch.cat([self.value_BFC, new_BGC], dim=1)
        return value_BFC, replace(self, value_BFC=value_BFC.detach())


@dataclass(frozen=True)
class StaticColumn:
    """One value per slot of a bank, all slots there from the start, and a spare one behind them for new values that a
    sequence does not use.

    Written in place. That is safe before the call is done: a slot is visible only once the bank's count says so.

    Attributes:
        kind: what its bytes are called.
        ratio: tokens per slot (m).
        value_BFC: the values, F = capacity // m + 1.
    """

    kind: str
    ratio: int
    value_BFC: Tensor

    def narrow(self, tokens: int) -> StaticColumn:
        """The slots that so many tokens can fill, and behind them one to spare, in the same buffer."""
        return replace(self, value_BFC=self.value_BFC[:, : tokens // self.ratio + 1])

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, StaticColumn]:
        """Writes the new values behind the slots that each sequence has filled so far. Positions are computed on the
        device."""
        spare = self.value_BFC.shape[1] - 1
        place_BGC = slots.places(spare)[..., None].expand(new_BGC.shape)
        self.value_BFC.scatter_(1, place_BGC, in_dtype(new_BGC.detach(), self.value_BFC.dtype))
        return self.value_BFC, self


@dataclass(frozen=True)
class State:
    """The state of a recurrence, a matrix for every head, in at least float32: what is added to it again and again must
    not be rounded away. Its size being fixed, it is the same in a memory that grows and in a static one.

    Attributes:
        kind: what its bytes are called.
        value_BHRC: the state.
    """

    kind: str
    value_BHRC: Tensor

    @staticmethod
    def empty(kind: str, like_BHRC: Tensor) -> State:
        """A state of zeros, of the sizes and on the device of ``like_BHRC``."""
        return State(kind, promoted(torch.zeros_like(like_BHRC)))

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """The state that is kept."""
        return self.value_BHRC

    def keep(self, after_BHRC: Tensor, out_BTHC: Tensor) -> tuple[State, Tensor]:
        """The next state, without its gradient."""
        return replace(self, value_BHRC=after_BHRC.detach()), out_BTHC
