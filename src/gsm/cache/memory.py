"""The memory of a whole model: a tree of stores that goes into ``forward`` and comes out again, never hanging on a
module.

A growing memory is a value: a call returns the next one. A static memory is a set of buffers that keep their place, so
that a captured graph can be replayed on them: a call returns the same one, changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gsm.cache.ledger import Ledger
from gsm.cache.slots import Slots, every_token
from gsm.cache.store import FORGET, Column, ColumnStore, State, StateStore, StaticColumn, Window, WindowStore
from gsm.span import Span


@dataclass(frozen=True)
class BankCache:
    """What the owner of a bank keeps: entries, index keys, and the tokens of a group that is not finished yet.

    Attributes:
        pending: the last m - 1 tokens' values and gates, side by side, or of more tokens what groups are made of.
        entry: bank entries, rotated.
        key: index keys, rotated (None: the owner does not search its bank).
        count_B: int64, slots filled (None where nothing is kept).
    """

    pending: WindowStore
    entry: ColumnStore
    key: ColumnStore | None
    count_B: Tensor | None

    @staticmethod
    def empty(kind: str, ratio: int, pending_BC: Tensor, entry_BC: Tensor, key_BI: Tensor | None) -> BankCache:
        """A bank without slots; the tensors give batch, widths, dtype and device, ``kind`` labels the bytes
        (``encoder_bank``)."""
        return BankCache(
            Window.empty(f"{kind}_pending", ratio - 1, pending_BC),
            Column.empty(kind, ratio, entry_BC),
            None if key_BI is None else Column.empty("index_keys", ratio, key_BI),
            torch.zeros(entry_BC.shape[0], dtype=torch.int64, device=entry_BC.device),
        )


@dataclass(frozen=True)
class LayerCache:
    """What a sparse-attention layer keeps: its window, and its bank if it owns one."""

    window: WindowStore
    bank: BankCache | None = None


@dataclass(frozen=True)
class DenseCache:
    """One value for every token of the past: keys and values of dense attention.

    Attributes:
        entry: the values, in stream order, padding included.
        count_B: int64, tokens read (None where nothing is kept).
    """

    entry: ColumnStore
    count_B: Tensor | None

    @staticmethod
    def empty(kind: str, like_BC: Tensor) -> DenseCache:
        """A cache of nothing, for as many sequences and of the width, dtype and device of ``like_BC``."""
        count_B = torch.zeros(like_BC.shape[0], dtype=torch.int64, device=like_BC.device)
        return DenseCache(Column.empty(kind, 1, like_BC), count_B)

    def extend(self, new_BTC: Tensor, span: Span) -> tuple[Tensor, Slots, DenseCache]:
        """Returns the values of all tokens, ``value_BFC``; which of them each new token sees; the cache after it. All
        caches fill alike: one plan serves them."""
        slots = span.once(("slots", "every token"), lambda: every_token(span.position_BT, self.count_B))
        value_BFC, entry = self.entry.place(new_BTC, slots)
        return value_BFC, slots, DenseCache(entry, None if self.count_B is None else slots.after_B)


@dataclass(frozen=True)
class BlockCache:
    """What attention to blocks of tokens keeps: all tokens, and its blocks as a bank, whose pending tokens are its
    window too."""

    tokens: DenseCache
    blocks: BankCache


@dataclass(frozen=True)
class RecurrentCache:
    """What a recurrent layer keeps: the last inputs of its convolution, and its state."""

    convolution: WindowStore
    state: StateStore


@dataclass(frozen=True)
class Memory:
    """Everything a model keeps between calls.

    Attributes:
        document_B: int64, document id of the last token (-1: none yet).
        position_B: int64, its position inside its document (-1: none yet).
        encoder: what each encoder layer keeps.
        stages: what each stage's retriever keeps (None: nothing).
        state: what the writer keeps: the shared state, the last M entries (GSM).
        decoder: what each decoder layer keeps, or all of them together (baseline and comparators).
        ledger: what the host knows of this memory.
        narrowed_to: tokens read after the next call, for which alone ``narrow`` has made this (None: it is for any).
    """

    document_B: Tensor
    position_B: Tensor
    encoder: tuple[Any, ...] = ()
    stages: tuple[Any, ...] = ()
    state: Any = None
    decoder: tuple[Any, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    narrowed_to: int | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.document_B.shape[0]

    @property
    def capacity(self) -> int | None:
        """Tokens that a static memory holds; None for one that grows."""
        return self.ledger.capacity

    @property
    def used(self) -> int:
        """Tokens read so far, padding included."""
        return self.ledger.used

    def layout(self) -> tuple[tuple, ...]:
        """Kind, size, width and dtype of every store: a memory fits the models whose own has the same layout."""
        return tuple(_stores(self))

    def breakdown(self) -> dict[str, int]:
        """Bytes by kind (``encoder_window``, ``encoder_bank``, ``index_keys``, ``shared_state``, ``bookkeeping``,
        ...), every storage once."""
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for kind, tensor in _tensors(self, "bookkeeping"):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes

    def nbytes(self) -> int:
        """Bytes of all storages that this memory holds on to, each counted once."""
        return sum(self.breakdown().values())

    def cache_bytes(self) -> int:
        """Bytes of what was read and kept: all but bookkeeping."""
        return sum(size for kind, size in self.breakdown().items() if kind != "bookkeeping")

    def clone(self) -> Memory:
        """An independent copy: fork a prefix and continue both."""
        return map_nodes(self, (Tensor,), torch.clone)

    def expand(self, times: int) -> Memory:
        """Repeats every sequence ``times`` times in a row: [a, b] becomes [a, a, b, b] for 2; an independent copy.
        Raises ValueError for times < 1."""
        if times < 1:
            raise ValueError(f"times must be at least 1, got {times}")
        return map_nodes(self, (Tensor,), lambda x: x.repeat_interleave(times, dim=0))

    def static(self, capacity: int) -> Memory:
        """An empty static memory for so many tokens, with the stores of this empty growing one. Raises ValueError for
        a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 token, or None for a memory that grows; got {capacity}")
        memory = map_nodes(self, (Window, Column), lambda store: store.static(capacity))
        return replace(memory, ledger=replace(self.ledger, capacity=capacity))

    def narrow(self, tokens: int) -> Memory:
        """The same buffers, with as many bank slots as ``tokens`` tokens need: what a call that knows where it ends
        need not pay for the others. A growing memory is itself no larger than that."""
        if self.capacity is None:
            return self
        kinds = (StaticColumn, Tensor, Ledger)
        narrowed = map_nodes(self, kinds, lambda node: node.narrow(tokens) if isinstance(node, StaticColumn) else node)
        return replace(narrowed, narrowed_to=tokens)

    def continued(self, span: Span) -> Span:
        """The new positions of a call without documents, with what this memory knows of where they stand."""
        if not self.ledger.single_document:
            return span
        if self.capacity is None:
            return replace(span, single_document=True)
        used = self.used + span.position_BT.shape[1]
        return replace(span, filled=used if used == self.narrowed_to else None)

    @property
    def keeps_padding(self) -> bool:
        """Whether padding takes up room, as it does where there is a slot for every token."""
        return holds(self, DenseCache)

    def mark(self) -> Memory:
        """What ``rewind`` needs to come back to this point: a copy of everything but bank slots, to which later calls
        only add. Good as long as nobody has gone back to before it (``rewind``, ``load``): that needs ``clone``."""
        return map_nodes(self, (StaticColumn, Tensor), lambda node: node.clone() if isinstance(node, Tensor) else node)

    def rewind(self, mark: Memory) -> None:
        """Goes back, in place, to an earlier point, or with an empty static memory of any capacity to the beginning.
        Bank slots filled since then are not cleared: the counts put them out of sight.

        Raises:
            ValueError: for a growing memory, of which the earlier point is the earlier memory, and for a point that
                does not fit.
        """
        if self.capacity is None:
            raise ValueError("a growing memory is never changed in place; go on from the earlier memory instead")
        if mark.batch != self.batch or mark.used > self.capacity:
            raise ValueError(
                f"a point of batch {mark.batch} after {mark.used} tokens does not fit a memory of batch {self.batch} "
                f"and capacity {self.capacity}"
            )
        _overwrite(_without_slots(self), _without_slots(mark))
        self.ledger.follow(mark.ledger)

    def advance(self, after: Memory, tokens: int, single_document: bool, rows: int) -> Memory:
        """The memory after a call that read ``tokens`` tokens, without documents of their own or with them, and left
        the stores ``after``.

        A growing memory gives way to ``after``, of whose tensors those that are a part of a longer one are copied, to
        hold on to no more than that part. A static one copies ``after`` into its own buffers, and stays: until here
        nothing that can be seen has changed, so a call that fails on the way leaves it as it was.
        """
        if self.capacity is None:
            compact = map_nodes(after, (Tensor, Ledger), lambda x: _compact(x) if isinstance(x, Tensor) else x)
            ledger = replace(self.ledger)
            ledger.claim(tokens, single_document, rows)
            return replace(compact, ledger=ledger)
        _overwrite(self, after)
        self.ledger.claim(tokens, single_document, rows)
        return self

    def load(self, other: Memory) -> None:
        """Takes over what another static memory holds, in place: a captured graph goes on from another prefix.

        Raises:
            ValueError: unless both are static and of the same batch, capacity and model.
        """
        if self.capacity is None:
            raise ValueError("a growing memory is never changed in place; use the other memory itself, or its clone()")
        mine, others = [(m.batch, m.capacity, m.ledger.layout) for m in (self, other)]
        if mine != others:
            raise ValueError(
                f"memory for batch {other.batch} and capacity {other.capacity} does not fit into one of the same model "
                f"for batch {self.batch} and capacity {self.capacity}; both have to agree"
            )
        _overwrite(self, other)
        self.ledger.follow(other.ledger)


def no_last_token(batch: int, device: torch.device) -> dict[str, Any]:
    """Document and position of the last token, in a memory that has read none."""
    nothing_B = torch.full((batch,), -1, dtype=torch.int64, device=device)
    return {"document_B": nothing_B, "position_B": nothing_B.clone()}


def forgetful(node: Any) -> Any:
    """What training is given in place of these caches: a layer writes to it as to any other, and nothing is kept."""
    stores = (Window, Column, State)
    return map_nodes(node, (*stores, Tensor), lambda one: FORGET if isinstance(one, stores) else None)


def map_nodes(node: Any, kinds: tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """The same tree with every node of these kinds replaced; what lies below them is left to ``function``. Dataclasses
    on the way, a ledger too, are new ones."""
    if isinstance(node, kinds):
        return function(node)
    if is_dataclass(node) and not isinstance(node, type):
        return type(node)(**{f.name: map_nodes(getattr(node, f.name), kinds, function) for f in fields(node)})
    if isinstance(node, tuple):
        return tuple(map_nodes(item, kinds, function) for item in node)
    return node


def holds(node: Any, kind: type) -> bool:
    """Whether there is a node of this kind in a tree."""
    return isinstance(node, kind) or any(holds(part, kind) for part in _parts(node))


def _stores(node: Any) -> Iterator[tuple]:
    """Windows, columns and states below ``node``, in order."""
    if isinstance(node, Window):
        yield node.kind, node.size, node.entry_BEC.shape[-1], node.entry_BEC.dtype
    elif isinstance(node, Column | StaticColumn):
        yield node.kind, node.ratio, node.value_BFC.shape[-1], node.value_BFC.dtype
    elif isinstance(node, State):
        yield node.kind, *node.value_BHRC.shape[1:], node.value_BHRC.dtype
    else:
        for part in _parts(node):
            yield from _stores(part)


def _parts(node: Any) -> Iterator[Any]:
    """What lies directly below a node of the tree. Raises TypeError for a container that a memory cannot hold."""
    if isinstance(node, Ledger):
        return
    if is_dataclass(node):
        yield from (getattr(node, f.name) for f in fields(node))
    elif isinstance(node, tuple) and not hasattr(node, "_fields"):
        yield from node
    elif not isinstance(node, Tensor | str | int | None):
        raise TypeError(f"a memory is made of dataclasses, tuples and tensors, got {type(node).__name__}")


def _tensors(node: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors below ``node`` with the kind of the store that they lie in."""
    if isinstance(node, Tensor):
        yield kind, node
    for part in _parts(node):
        yield from _tensors(part, getattr(node, "kind", kind))


def _overwrite(memory: Memory, after: Memory) -> None:
    """Copies every tensor of ``after`` into the one at its place. Raises TypeError, before anything is written, if they
    differ in shape."""
    pairs = list(zip(_tensors(memory, "bookkeeping"), _tensors(after, "bookkeeping"), strict=True))
    for (kind, buffer), (_, value) in pairs:
        if buffer.shape != value.shape:
            raise TypeError(
                f"a static memory keeps its shapes, but {kind} went from {list(buffer.shape)} to {list(value.shape)}; "
                "keep what grows in a Window or a Column"
            )
    # A list for each dtype: on a GPU a list is one kernel, if every pair has the same strides. Those of a buffer and of
    # the end of a longer tensor differ in a batch of one, but only where the size is 1.
    changed: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for (_, buffer), (_, value) in pairs:
        if buffer is not value:
            buffers, values = changed.setdefault(buffer.dtype, ([], []))
            buffers.append(buffer.squeeze(0))
            values.append(value.squeeze(0))
    for buffers, values in changed.values():
        torch._foreach_copy_(buffers, values)


def _compact(x: Tensor) -> Tensor:
    """The tensor in a storage of its own size."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone(memory_format=torch.contiguous_format)


def _without_slots(memory: Memory) -> Memory:
    """The same memory with nothing where the slots of its banks are."""
    return map_nodes(memory, (StaticColumn, Ledger), lambda node: None if isinstance(node, StaticColumn) else node)
