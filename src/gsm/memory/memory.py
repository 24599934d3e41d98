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
        key: index keys, rotated.
        count_B: int64, slots filled (None where nothing is kept).
    """

    pending: WindowStore
    entry: ColumnStore
    key: ColumnStore
    count_B: Tensor | None

    @staticmethod
    def empty(kind: str, ratio: int, pending_BC: Tensor, entry_BC: Tensor, key_BI: Tensor) -> BankMemory:
        """A bank without slots; the tensors give batch, widths, dtype and device, ``kind`` labels the bytes
        (``encoder_bank``)."""
        return BankMemory(
            Window.empty(f"{kind}_pending", ratio - 1, pending_BC),
            Column.empty(kind, entry_BC),
            Column.empty("index_keys", key_BI),
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

    def layers(self) -> dict[str, int]:
        """How many layers, stages and states it remembers for: two memories with other numbers do not fit one model."""
        return {
            "encoder layers": len(self.encoder),
            "stages": len(self.stages),
            "states": int(self.state is not None),
            "decoder layers": len(self.decoder),
        }

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


def _tensors(node: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors below ``node`` with the kind of the store that they lie in."""
    if isinstance(node, Tensor):
        yield kind, node
    elif is_dataclass(node):
        below = getattr(node, "kind", kind)
        for field in fields(node):
            yield from _tensors(getattr(node, field.name), below)
    elif isinstance(node, tuple):
        for item in node:
            yield from _tensors(item, kind)


def _map(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with every tensor replaced."""
    if isinstance(node, Tensor):
        return function(node)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{f.name: _map(getattr(node, f.name), function) for f in fields(node)})
    if isinstance(node, tuple):
        return tuple(_map(item, function) for item in node)
    return node
