"""Memories with random contents in place of a long prefix, for measurements and tests of later calls. Reading a million
tokens takes minutes; drawing their memory takes a moment."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gsm.cache.ledger import Ledger
from gsm.cache.memory import BankCache, DenseCache, Memory, map_nodes
from gsm.cache.store import Column, RecurrentState, StaticColumn, StaticWindow, Window


class Starts(Protocol):
    """A model that makes empty memories."""

    def start(self, batch: int = 1, capacity: int | None = None) -> Memory:
        """See ``LanguageModel.start``."""
        ...


def synthetic_memory(
    model: Starts, tokens: int, capacity: int | None, batch: int = 1, generator: torch.Generator | None = None
) -> Memory:
    """Return the memory of one document of ``tokens`` tokens, with random contents and real shapes, counts and bytes.

    Entries and keys are normed in every model, so standard normal numbers have a realistic size; a recurrence's state
    is drawn with variance 1 / C.

    Args:
        model: makes the empty memory.
        tokens: number of tokens that count as read; at least the size of the longest window.
        capacity: as in ``LanguageModel.start``: None for a memory that grows.
        batch: number of sequences.
        generator: source of randomness on the model's device.

    Raises:
        ValueError: for fewer tokens than a window holds, or more than the capacity.
    """
    memory = model.start(batch, capacity)
    memory.ledger.claim(tokens)
    fill = partial(_fill, tokens=tokens, generator=generator)
    memory = map_nodes(memory, (BankCache, DenseCache, Window, Column, StaticColumn, RecurrentState, Ledger), fill)
    memory.document_B.fill_(0)
    memory.position_B.fill_(tokens - 1)
    return memory


def _fill(node: Any, tokens: int, generator: torch.Generator | None) -> Any:
    """Return a store with random contents, or a bank or cache with random contents and its count."""
    fill = partial(_fill, tokens=tokens, generator=generator)
    if isinstance(node, BankCache):
        count_B = _set_count(node.count_B, tokens // _ratio(node.entry))
        key = None if node.key is None else fill(node.key)
        return BankCache(fill(node.pending), fill(node.entry), key, count_B)
    if isinstance(node, DenseCache):
        return DenseCache(fill(node.entry), _set_count(node.count_B, tokens))
    if isinstance(node, Window):
        return replace(node, entry_BEC=_window(node, tokens).normal_(generator=generator))
    if isinstance(node, Column):
        return replace(node, value_BFC=_buffer(node.value_BFC, tokens // node.ratio).normal_(generator=generator))
    if isinstance(node, StaticColumn):
        node.value_BFC[:, : tokens // node.ratio].normal_(generator=generator)
    if isinstance(node, RecurrentState):
        node.value_BHRC.normal_(std=node.value_BHRC.shape[-1] ** -0.5, generator=generator)
    return node


def _window(node: Window, tokens: int) -> Tensor:
    """Return an uninitialised buffer of the window's size. Raises ValueError if the tokens do not fill the window."""
    if tokens < node.size:
        raise ValueError(
            f"tokens={tokens} is not allowed because {node.kind} must be full. Use at least {node.size} tokens"
        )
    return node.entry_BEC if isinstance(node, StaticWindow) else _buffer(node.entry_BEC, node.size)


def _buffer(empty_BFC: Tensor, entries: int) -> Tensor:
    return empty_BFC.new_empty(empty_BFC.shape[0], entries, empty_BFC.shape[2])


def _ratio(entry: Any) -> int:
    return entry.ratio


def _set_count(count_B: Tensor | None, slots: int) -> Tensor | None:
    return None if count_B is None else count_B.fill_(slots)
