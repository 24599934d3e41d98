"""The memory of a whole model: a tree of stores that goes into ``forward`` and comes out again, never hanging on a
module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gsm.memory.store import FORGET, Column, ColumnStore, Window, WindowStore


@dataclass(frozen=True)
class BankMemory:
    """What the owner of a bank keeps: entries, index keys, and the tokens of a group that is not finished yet.

    Attributes:
        pending: the last m - 1 tokens' values and gates, side by side.
        entry: bank entries, rotated.
        key: index keys, rotated (None: the owner does not search its bank).
        count_B: int64, slots filled (None where nothing is kept).
    """

    pending: WindowStore
    entry: ColumnStore
    key: ColumnStore | None
    count_B: Tensor | None

    @staticmethod
    def empty(kind: str, ratio: int, pending_BC: Tensor, entry_BC: Tensor, key_BI: Tensor | None) -> BankMemory:
        """A bank without slots; the tensors give batch, widths, dtype and device, ``kind`` labels the bytes
        (``encoder_bank``)."""
        return BankMemory(
            Window.empty(f"{kind}_pending", ratio - 1, pending_BC),
            Column.empty(kind, entry_BC),
            None if key_BI is None else Column.empty("index_keys", key_BI),
            torch.zeros(entry_BC.shape[0], dtype=torch.int64, device=entry_BC.device),
        )


@dataclass(frozen=True)
class LayerMemory:
    """What a sparse-attention layer keeps: its window, and its bank if it owns one."""

    window: WindowStore
    bank: BankMemory | None = None


# What a layer is given in training: it writes to it as to any memory, and nothing is kept.
FORGETFUL = LayerMemory(FORGET, BankMemory(FORGET, FORGET, FORGET, None))


@dataclass(frozen=True)
class Memory:
    """Everything a model keeps between calls. Immutable: a call returns the next one.

    Attributes:
        document_B: int64, document id of the last token (-1: none yet).
        position_B: int64, its position inside its document (-1: none yet).
        encoder: one ``LayerMemory`` per encoder layer.
        stages: what each stage's retriever keeps (None: nothing).
        state: the shared state, the last M entries (GSM).
        decoder: one ``LayerMemory`` per decoder layer (baseline).
    """

    document_B: Tensor
    position_B: Tensor
    encoder: tuple[LayerMemory, ...] = ()
    stages: tuple[Any, ...] = ()
    state: WindowStore | None = None
    decoder: tuple[LayerMemory, ...] = ()

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.document_B.shape[0]

    def layout(self) -> list[tuple]:
        """Kind, capacity, width and dtype of every store: a memory fits the models whose own has the same layout."""
        return list(_stores(self))

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

    def clone(self) -> Memory:
        """An independent copy: fork a prefix and continue both."""
        return _map(self, Tensor.clone)

    def expand(self, times: int) -> Memory:
        """Repeats every sequence ``times`` times in a row: [a, b] becomes [a, a, b, b] for 2. Raises ValueError for
        times < 1."""
        if times < 1:
            raise ValueError(f"times must be at least 1, got {times}")
        return _map(self, lambda x: x.repeat_interleave(times, dim=0))


def fresh_bookkeeping(batch: int, device: torch.device) -> dict[str, Any]:
    """The fields of a memory that has seen nothing yet."""
    nothing_B = torch.full((batch,), -1, dtype=torch.int64, device=device)
    return {"document_B": nothing_B, "position_B": nothing_B.clone()}


def _stores(node: Any) -> Iterator[tuple]:
    """Windows and columns below ``node``, in order."""
    if isinstance(node, Window):
        yield node.kind, node.size, node.entry_BEC.shape[-1], node.entry_BEC.dtype
    elif isinstance(node, Column):
        yield node.kind, None, node.value_BFC.shape[-1], node.value_BFC.dtype
    else:
        for part in _parts(node):
            yield from _stores(part)


def _parts(node: Any) -> Iterator[Any]:
    """What lies directly below a node of the tree. Raises TypeError for a container that a memory cannot hold."""
    if is_dataclass(node):
        yield from (getattr(node, field.name) for field in fields(node))
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


def _map(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with every tensor replaced."""
    if isinstance(node, Tensor):
        return function(node)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{f.name: _map(getattr(node, f.name), function) for f in fields(node)})
    if isinstance(node, tuple):
        return tuple(_map(item, function) for item in node)
    return node
