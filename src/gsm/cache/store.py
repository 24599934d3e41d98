"""The stores of a layer between calls. All stores have the same few methods, so that a mixer does not depend on the
mode (training or generation) or on the kind of memory:

                 implementation                   entries of the past    values of a bank    a recurrence's state
    training     stores nothing                   ``Forget``             ``Forget``          ``Forget``
    growing      immutable values                 ``Window``             ``Column``          ``RecurrentState``
    static       buffers at fixed addresses       ``Window``             ``StaticColumn``    ``RecurrentState``
    in pieces    on several ranks                 ``Halo``               ``AllSlots``        ``Relay``

Stores of sequences in pieces are in ``gsm.context.pieces``. Extending a store returns the next one. Stores are pure,
so that activations can be recomputed and a prefix can be forked. A static memory copies the next stores into its
buffers at the end of the call.
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
        """Return stored and new entries in stream order, ``seen_BEC``, and the next store."""
        ...


class ColumnStore(Protocol):
    """One value for every slot of a bank."""

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, ColumnStore]:
        """Return the values of all slots, ``value_BFC``, and the next store."""
        ...


class StateStore(Protocol):
    """The state of a recurrence, its whole memory of the past."""

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """Return the initial state of a call: the stored one, or ``empty_BHRC`` if nothing is stored."""
        ...

    def keep(self, after_BHRC: Tensor, out_BTHC: Tensor) -> tuple[StateStore, Tensor]:
        """Return the store with the final state ``after_BHRC``, and the call's output ``out_BTHC``.

        If states travel between ranks, the backward of the returned output waits for the gradient of the state.
        """
        ...


class Forget:
    """The store of training: it has no past entries, and discards new ones."""

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, Forget]:
        """Return the new entries unchanged."""
        return new_BTC, self

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, Forget]:
        """Return the new values unchanged: without a memory, the new slots are all slots."""
        return new_BGC, self

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """Return the empty state, because every call starts from it."""
        return empty_BHRC

    def keep(self, after_BHRC: Tensor, out_BTHC: Tensor) -> tuple[Forget, Tensor]:
        """Discard the state; return the output unchanged."""
        return self, out_BTHC


FORGET = Forget()


@dataclass(frozen=True)
class Window:
    """The last ``size`` entries.

    After a pruned prefill, there may be a gap in the stream between the stored entries and the next new ones. No row
    reaches across it, because a layer always writes the ``size`` positions in front of its first requested row.
    """

    kind: str
    size: int
    entry_BEC: Tensor

    @staticmethod
    def empty(kind: str, size: int, like_BC: Tensor) -> Window:
        """Return a window without entries, with the batch, width, dtype and device of ``like_BC``."""
        return Window(kind, size, like_BC.new_empty(like_BC.shape[0], 0, like_BC.shape[1]))

    def static(self, capacity: int) -> Window:
        """Return the window of a static memory: a buffer of full size, whatever the capacity.

        Until it is full, it begins with zeros. No row sees them, because no row looks back beyond position 0 of its
        document. The buffer is not a ring with a cursor: attention reads stored and new entries in stream order, so a
        ring would have to be unrolled at every read, and shifting a few hundred entries costs no more than that. Nor
        would a ring save an operation: each layer writes its new entry either way, and one copy at the end of the call
        shifts the windows of all layers.
        """
        batch, _, width = self.entry_BEC.shape
        return replace(self, entry_BEC=self.entry_BEC.new_zeros(batch, self.size, width))

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, Window]:
        """Return the stored entries followed by the new ones, and the last ``size`` of them as the next window."""
        seen_BEC = torch.cat([self.entry_BEC, in_dtype(new_BTC, self.entry_BEC.dtype)], dim=1)
        keep = min(self.size, seen_BEC.shape[1])
        return seen_BEC, replace(self, entry_BEC=seen_BEC[:, seen_BEC.shape[1] - keep :].detach())


@dataclass(frozen=True)
class Column:
    """One value per slot of a growing bank. Slots beyond the end of a sequence hold zeros.

    Attributes:
        kind: label of its bytes.
        ratio: tokens per slot (m).
        value_BFC: the values.
    """

    kind: str
    ratio: int
    value_BFC: Tensor

    @staticmethod
    def empty(kind: str, ratio: int, like_BC: Tensor) -> Column:
        """Return a column without slots, with the batch, width, dtype and device of ``like_BC``."""
        return Column(kind, ratio, like_BC.new_empty(like_BC.shape[0], 0, like_BC.shape[1]))

    def static(self, capacity: int) -> StaticColumn:
        """Return an empty column of the same kind with all the slots that ``capacity`` tokens can fill."""
        batch, _, width = self.value_BFC.shape
        return StaticColumn(self.kind, self.ratio, self.value_BFC.new_zeros(batch, capacity // self.ratio + 1, width))

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, Column]:
        """Write the new values after the filled slots of each sequence."""
        batch, stored, width = self.value_BFC.shape
        new_BGC = in_dtype(new_BGC, self.value_BFC.dtype)
        if slots.uniform:
            return self.append(new_BGC)
        total, added = slots.growth
        if added == 0:
            return self.value_BFC, self
        if batch == 1:  # a single sequence uses the first of its new slots
            return self.append(new_BGC[:, :added])
        # One extra slot: unused new values are written there and dropped.
        table_BFC = self.value_BFC.new_zeros(batch, total + 1, width)
        table_BFC[:, :stored] = self.value_BFC
        place_BGC = slots.places(total)[:, :added, None].expand(-1, -1, width)
        value_BFC = table_BFC.scatter(1, place_BGC, new_BGC[:, :added])[:, :total].contiguous()
        return value_BFC, replace(self, value_BFC=value_BFC.detach())

    def append(self, new_BGC: Tensor) -> tuple[Tensor, Column]:
        """Append the new values to every sequence."""
        value_BFC = torch.cat([self.value_BFC, new_BGC], dim=1)
        return value_BFC, replace(self, value_BFC=value_BFC.detach())


@dataclass(frozen=True)
class StaticColumn:
    """One value per slot of a bank of fixed capacity. A spare slot at the end receives unused new values.

    Calls write in place. This is safe before the end of the call, because a slot is visible only once the bank's count
    includes it.

    Attributes:
        kind: label of its bytes.
        ratio: tokens per slot (m).
        value_BFC: the values, F = capacity // m + 1.
    """

    kind: str
    ratio: int
    value_BFC: Tensor

    def narrow(self, tokens: int) -> StaticColumn:
        """Return a view of the slots that ``tokens`` tokens can fill, followed by a spare slot."""
        return replace(self, value_BFC=self.value_BFC[:, : tokens // self.ratio + 1])

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, StaticColumn]:
        """Write the new values after the filled slots of each sequence. Slots are computed on the device."""
        spare = self.value_BFC.shape[1] - 1
        place_BGC = slots.places(spare)[..., None].expand(new_BGC.shape)
        self.value_BFC.scatter_(1, place_BGC, in_dtype(new_BGC.detach(), self.value_BFC.dtype))
        return self.value_BFC, self


@dataclass(frozen=True)
class RecurrentState:
    """The state of a recurrence, one matrix per head.

    It has at least float32, so that repeated small additions are not rounded away. Growing and static memories use the
    same class, because its size is fixed.

    Attributes:
        kind: label of its bytes.
        value_BHRC: the state.
    """

    kind: str
    value_BHRC: Tensor

    @staticmethod
    def empty(kind: str, like_BHRC: Tensor) -> RecurrentState:
        """Return a state of zeros, with the sizes and device of ``like_BHRC``."""
        return RecurrentState(kind, promoted(torch.zeros_like(like_BHRC)))

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """Return the stored state."""
        return self.value_BHRC

    def keep(self, after_BHRC: Tensor, out_BTHC: Tensor) -> tuple[RecurrentState, Tensor]:
        """Store the final state without its gradient; return the output unchanged."""
        return replace(self, value_BHRC=after_BHRC.detach()), out_BTHC
