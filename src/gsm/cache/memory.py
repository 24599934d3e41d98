"""The memory of a whole model: a tree of stores that ``forward`` takes and returns. No module holds it.

A growing memory is a value: a call returns the next one. A static memory is a set of buffers at fixed addresses, so
that a captured graph can be replayed on them: a call changes and returns the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gsm.cache.ledger import Ledger
from gsm.cache.slots import Slots, every_token
from gsm.cache.store import FORGET, Column, ColumnStore, RecurrentState, StateStore, StaticColumn, Window, WindowStore
from gsm.span import Span


@dataclass(frozen=True)
class BankCache:
    """The cache of a layer with a bank: entries, index keys, and the tokens of an unfinished group.

    Attributes:
        pending: inputs of the compressor for the last m - 1 tokens: values and gates, concatenated. In a
            ``BlockCache``, keys and values of m - 1 tokens or more.
        entry: bank entries, rotated.
        key: index keys, rotated (None: the owner does not search its bank).
        count_B: int64, slots filled (None in training).
    """

    pending: WindowStore
    entry: ColumnStore
    key: ColumnStore | None
    count_B: Tensor | None

    @staticmethod
    def empty(kind: str, ratio: int, pending_BC: Tensor, entry_BC: Tensor, key_BI: Tensor | None) -> BankCache:
        """Return a bank without slots. The tensors define batch, widths, dtype and device; ``kind`` labels the bytes
        (``encoder_bank``)."""
        return BankCache(
            Window.empty(f"{kind}_pending", ratio - 1, pending_BC),
            Column.empty(kind, ratio, entry_BC),
            None if key_BI is None else Column.empty("index_keys", ratio, key_BI),
            torch.zeros(entry_BC.shape[0], dtype=torch.int64, device=entry_BC.device),
        )


@dataclass(frozen=True)
class LayerCache:
    """The cache of a sparse-attention layer.

    Attributes:
        window: its window.
        bank: its bank (None: it owns none).
    """

    window: WindowStore
    bank: BankCache | None = None


@dataclass(frozen=True)
class DenseCache:
    """The cache of dense attention: keys and values of every past token.

    Attributes:
        entry: keys and values in stream order, padding included.
        count_B: int64, tokens read (None in training).
    """

    entry: ColumnStore
    count_B: Tensor | None

    @staticmethod
    def empty(kind: str, like_BC: Tensor) -> DenseCache:
        """Return an empty cache with the batch, width, dtype and device of ``like_BC``."""
        count_B = torch.zeros(like_BC.shape[0], dtype=torch.int64, device=like_BC.device)
        return DenseCache(Column.empty(kind, 1, like_BC), count_B)

    def extend(self, new_BTC: Tensor, span: Span) -> tuple[Tensor, Slots, DenseCache]:
        """Return the values of all tokens, ``value_BFC``, the slots that each new token sees, and the next cache.

        All caches of a memory are equally full, so they share one plan.
        """
        slots = span.once(("slots", "every token"), lambda: every_token(span.position_BT, self.count_B))
        value_BFC, entry = self.entry.place(new_BTC, slots)
        return value_BFC, slots, DenseCache(entry, None if self.count_B is None else slots.after_B)


@dataclass(frozen=True)
class BlockCache:
    """The cache of attention to blocks of tokens: all tokens, and the blocks as a bank. The bank's pending tokens also
    serve as the window."""

    tokens: DenseCache
    blocks: BankCache


@dataclass(frozen=True)
class RecurrentCache:
    """The cache of a recurrent layer: the last inputs of its convolution, and its state."""

    convolution: WindowStore
    state: StateStore


@dataclass(frozen=True)
class ConvolvedCache:
    """The cache of a block with a convolution before its feed-forward: its mixer's, and the convolution's last
    inputs."""

    mixer: Any
    convolution: WindowStore


@dataclass(frozen=True)
class Memory:
    """Everything that a model stores between calls.

    Attributes:
        document_B: int64, document id of the last token (-1: none yet).
        position_B: int64, position of the last token inside its document (-1: none yet).
        encoder: the cache of each encoder layer.
        stages: the cache of each stage's retriever (None: it has none).
        state: the caches of the writer: the shared state, the last M entries (GSM).
        decoder: the cache of each decoder layer, or one for all of them (baseline and comparators).
        ledger: counts and layout of this memory on the host.
        narrowed_to: in a view that ``narrow`` made for one call: the tokens read once that call is done (None: this
            memory is no such view).
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
        """Number of tokens that a static memory can hold; None for a growing memory."""
        return self.ledger.capacity

    @property
    def used(self) -> int:
        """Tokens read so far, padding included."""
        return self.ledger.used

    def __repr__(self) -> str:
        return f"Memory(batch={self.batch}, used={self.used}, capacity={self.capacity})"

    def layout(self) -> tuple[tuple, ...]:
        """Return kind, size, width and dtype of every store. A memory fits all models with the same layout."""
        return tuple(_stores(self))

    def breakdown(self) -> dict[str, int]:
        """Return the bytes by kind (``encoder_window``, ``encoder_bank``, ``index_keys``, ``shared_state``,
        ``bookkeeping``, ...); each storage counts once."""
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for kind, tensor in _tensors(self, "bookkeeping"):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes

    def nbytes(self) -> int:
        """Return the bytes of all storages that this memory references, each counted once."""
        return sum(self.breakdown().values())

    def cache_bytes(self) -> int:
        """Return the bytes of all stores without bookkeeping."""
        return sum(size for kind, size in self.breakdown().items() if kind != "bookkeeping")

    def decoder_bytes(self) -> int:
        """Return the bytes of what belongs to the decoder: the shared state, or windows, banks and caches of its
        layers; without the keys of indexers."""
        return of_decoder(self.breakdown())

    def clone(self) -> Memory:
        """Return an independent copy, to fork a prefix and continue both."""
        return map_nodes(self, (Tensor,), torch.clone)

    def expand(self, times: int) -> Memory:
        """Return an independent copy with every sequence repeated ``times`` times: [a, b] becomes [a, a, b, b] for 2.

        Raises ValueError for times < 1.
        """
        if times < 1:
            raise ValueError(f"times must be at least 1, got {times}")
        return map_nodes(self, (Tensor,), lambda x: x.repeat_interleave(times, dim=0))

    def static(self, capacity: int) -> Memory:
        """Return an empty static memory for ``capacity`` tokens, with the stores of this empty growing memory.

        Raises ValueError for a capacity below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, or None for a memory that grows, got {capacity}")
        memory = map_nodes(self, (Window, Column), lambda store: store.static(capacity))
        return replace(memory, ledger=replace(self.ledger, capacity=capacity))

    def narrow(self, tokens: int) -> Memory:
        """Return a view of this memory for one call, with the bank slots that the call can reach.

        The call then does not pay for the other slots. A growing memory is returned unchanged, because it has no other
        slots.

        Args:
            tokens: number of tokens read once the call is done.
        """
        if self.capacity is None:
            return self
        kinds = (StaticColumn, Tensor, Ledger)
        narrowed = map_nodes(self, kinds, lambda node: node.narrow(tokens) if isinstance(node, StaticColumn) else node)
        return replace(narrowed, narrowed_to=tokens)

    def continued(self, span: Span, single_document: bool) -> Span:
        """Return the span of a call with the facts about a single document that are known on the host.

        Args:
            span: the positions of the call.
            single_document: whether the call has no ``documents``.
        """
        if not (single_document and self.ledger.single_document):
            return span
        if self.capacity is None:
            return replace(span, single_document=True)
        used = self.used + span.position_BT.shape[1]
        return replace(span, filled=used if used == self.narrowed_to else None)

    @property
    def keeps_padding(self) -> bool:
        """Whether padding takes up room. It does if there is a slot for every token."""
        return holds(self, DenseCache)

    def mark(self) -> Memory:
        """Return a mark for ``rewind``: a copy of everything except bank slots, because later calls only append to
        them.

        The mark is invalid after rewinding to an earlier point (``rewind``, ``load``). Use ``clone`` if you need that.
        """
        return map_nodes(self, (StaticColumn, Tensor), lambda node: node.clone() if isinstance(node, Tensor) else node)

    def rewind(self, mark: Memory) -> None:
        """Rewind in place to ``mark``, or to the start if ``mark`` is an empty static memory of any capacity.

        Bank slots filled since the mark are not cleared; the counts make them invisible.

        Raises:
            ValueError: for a growing memory (continue from the earlier memory instead), or a mark that does not fit.
        """
        if self.capacity is None:
            raise ValueError(
                "capacity must be a number to rewind(), got None; a growing memory never changes, so use the earlier "
                "one itself"
            )
        if mark.batch != self.batch or mark.used > self.capacity:
            raise ValueError(
                f"mark must be of batch {self.batch} and at most {self.capacity} tokens, as this memory, got batch "
                f"{mark.batch} and {mark.used} tokens"
            )
        _overwrite(_without_slots(self), _without_slots(mark), mark.ledger)

    def advance(self, after: Memory, tokens: int, single_document: bool, rows: int) -> Memory:
        """Return the memory after a call.

        A growing memory is replaced by ``after``. Views are copied so that they do not keep their base tensors alive. A
        static memory copies ``after`` into its own buffers. Nothing visible changes before this point, so a failed call
        leaves it unchanged.

        Args:
            after: the stores after the call.
            tokens: number of tokens that the call read.
            single_document: whether the call had no ``documents``.
            rows: requested rows of the call.
        """
        ledger = replace(self.ledger)
        ledger.claim(tokens, single_document, rows)
        if self.capacity is None:
            compact = map_nodes(after, (Tensor, Ledger), lambda x: _compact(x) if isinstance(x, Tensor) else x)
            return replace(compact, ledger=ledger)
        _overwrite(self, after, ledger)
        return self

    def load(self, other: Memory) -> None:
        """Copy the contents of another static memory in place, so that a captured graph continues from another prefix.

        Raises:
            ValueError: unless both are static and of the same batch, capacity and model.
        """
        if self.capacity is None:
            raise ValueError(
                "capacity must be a number to load(), got None; a growing memory never changes, so use the other one "
                "itself, or its clone()"
            )
        target, source = [(m.batch, m.capacity, m.ledger.layout) for m in (self, other)]
        if target != source:
            raise ValueError(
                f"other must be a memory of the same model, batch and capacity ({self.batch}, {self.capacity}), got "
                f"({other.batch}, {other.capacity})"
            )
        _overwrite(self, other, other.ledger)


def of_decoder(sizes: Mapping[str, int]) -> int:
    """Return the sum over the kinds of ``Memory.breakdown`` that belong to the decoder."""
    return sum(size for kind, size in sizes.items() if kind.startswith(("decoder", "shared_state")))


def no_last_token(batch: int, device: torch.device) -> dict[str, Any]:
    """Return document and position of the last token for a memory without tokens."""
    nothing_B = torch.full((batch,), -1, dtype=torch.int64, device=device)
    return {"document_B": nothing_B, "position_B": nothing_B.clone()}


def forgetful(node: Any) -> Any:
    """Return a copy of a cache for training: its stores discard all writes (``FORGET``)."""
    stores = (Window, Column, RecurrentState)
    return map_nodes(node, (*stores, Tensor), lambda x: FORGET if isinstance(x, stores) else None)


def map_nodes(node: Any, kinds: tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Return the tree with every node of these kinds replaced by ``function(node)``.

    Nodes below them are not visited. All dataclasses above them, ledgers too, are copied.
    """
    if isinstance(node, kinds):
        return function(node)
    if is_dataclass(node) and not isinstance(node, type):
        return type(node)(**{f.name: map_nodes(getattr(node, f.name), kinds, function) for f in fields(node)})
    if isinstance(node, tuple):
        return tuple(map_nodes(item, kinds, function) for item in node)
    return node


def holds(node: Any, kind: type) -> bool:
    """Return whether a tree has a node of this kind."""
    return isinstance(node, kind) or any(holds(part, kind) for part in _parts(node))


def _stores(node: Any) -> Iterator[tuple]:
    """Yield the layout of the windows, columns and states below ``node``, in order."""
    if isinstance(node, Window):
        yield node.kind, node.size, node.entry_BEC.shape[-1], node.entry_BEC.dtype
    elif isinstance(node, Column | StaticColumn):
        yield node.kind, node.ratio, node.value_BFC.shape[-1], node.value_BFC.dtype
    elif isinstance(node, RecurrentState):
        yield node.kind, *node.value_BHRC.shape[1:], node.value_BHRC.dtype
    else:
        for part in _parts(node):
            yield from _stores(part)


def _parts(node: Any) -> Iterator[Any]:
    """Yield the children of a node. Raises TypeError for a container that a memory cannot hold."""
    if isinstance(node, Ledger):
        return
    if is_dataclass(node):
        yield from (getattr(node, f.name) for f in fields(node))
    elif isinstance(node, tuple) and not hasattr(node, "_fields"):
        yield from node
    elif not isinstance(node, Tensor | str | int | None):
        raise TypeError(f"memory must have dataclasses, tuples and tensors, got a {type(node).__name__}")


def _tensors(node: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors below ``node`` with the kind of their store."""
    if isinstance(node, Tensor):
        yield kind, node
    for part in _parts(node):
        yield from _tensors(part, getattr(node, "kind", kind))


def _overwrite(memory: Memory, after: Memory, ledger: Ledger) -> None:
    """Copy every tensor of ``after`` into the corresponding tensor of ``memory``, and the counts of ``ledger``.

    If a signal handler raises an exception, either everything has been copied or nothing. Raises TypeError before any
    write if shapes differ.
    """
    pairs = list(zip(_tensors(memory, "bookkeeping"), _tensors(after, "bookkeeping"), strict=True))
    for (kind, buffer), (_, value) in pairs:
        if buffer.shape != value.shape:
            raise TypeError(
                f"{kind} must keep the shape {list(buffer.shape)} in a static memory, got {list(value.shape)}; a "
                "Window or a Column holds a tensor that grows"
            )
    # One list per dtype: on a GPU a list is one kernel if every pair has equal strides. A new window is the end of a
    # longer tensor. For a batch of one, its strides differ from the buffer's in the first dimension only, and squeezing
    # removes that.
    changed: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for (_, buffer), (_, value) in pairs:
        if buffer is not value:
            buffers, values = changed.setdefault(buffer.dtype, ([], []))
            buffers.append(buffer.squeeze(0))
            values.append(value.squeeze(0))
    copies = map(torch._foreach_copy_, *zip(*changed.values(), strict=True)) if changed else ()
    # Python handles a signal when a function starts and when a call to C returns. Neither happens between counts and
    # copies.
    memory.ledger.follow(ledger)
    list(copies)


def _compact(x: Tensor) -> Tensor:
    """Return the tensor in a storage of exactly its size."""
    whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def _without_slots(memory: Memory) -> Memory:
    """Return the memory with its bank slots replaced by None."""
    return map_nodes(memory, (StaticColumn, Ledger), lambda node: None if isinstance(node, StaticColumn) else node)
