"""A memory as if so many tokens had been read, for measuring and testing what comes after them: to read a million
tokens takes minutes, to draw what they would leave a moment."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gsm.cache.ledger import Ledger
from gsm.cache.memory import BankCache, DenseCache, Memory, map_nodes
from gsm.cache.store import Column, State, StaticColumn, StaticWindow, Window


class Starts(Protocol):
    """What is asked of a model: empty memories."""

    def start(self, batch: int = 1, capacity: int | None = None) -> Memory:
        """See ``LanguageModel.start``."""
        ...


def synthetic_memory(
    model: Starts, tokens: int, capacity: int | None, batch: int = 1, generator: torch.Generator | None = None
) -> Memory:
    """The memory of a text of ``tokens`` tokens, one document, with random contents: shapes, counts and bytes are those
    of a real one.

    Entries and keys are normed in every model, so that standard normal numbers are about as large as real ones; a
    recurrence's state is drawn with variance 1 / C.

    Args:
        model: whose memory.
        tokens: as if read; at least as many as the longest window holds entries.
        capacity: as in ``LanguageModel.start``: None for a memory that grows.
        batch: number of sequences.
        generator: source of randomness on the model's device.

    Raises:
        ValueError: for fewer tokens than a window holds, or more than the capacity.
    """
    memory = model.start(batch, capacity)
    memory.ledger.claim(tokens)
    fill = partial(_filled, tokens=tokens, generator=generator)
    memory = map_nodes(memory, (BankCache, DenseCache, Window, Column, StaticColumn, State, Ledger), fill)
    memory.document_B.fill_(0)
    memory.position_B.fill_(tokens - 1)
    return memory


def _filled(node: Any, tokens: int, generator: torch.Generator | None) -> Any:
    """A store with random contents; a bank or a cache with its count."""
    fill = partial(_filled, tokens=tokens, generator=generator)
    if isinstance(node, BankCache):
        count_B = _counted(node.count_B, tokens // _ratio(node.entry))
        key = None if node.key is None else fill(node.key)
        return BankCache(fill(node.pending), fill(node.entry), key, count_B)
    if isinstance(node, DenseCache):
        return DenseCache(fill(node.entry), _counted(node.count_B, tokens))
    if isinstance(node, Window):
        return replace(node, entry_BEC=_window(node, tokens).normal_(generator=generator))
    if isinstance(node, Column):
        return replace(node, value_BFC=_longer(node.value_BFC, tokens // node.ratio).normal_(generator=generator))
    if isinstance(node, StaticColumn):
        node.value_BFC[:, : tokens // node.ratio].normal_(generator=generator)
    if isinstance(node, State):
        node.value_BHRC.normal_(std=node.value_BHRC.shape[-1] ** -0.5, generator=generator)
    return node


def _window(node: Window, tokens: int) -> Tensor:
    """Room for as many entries as the window holds."""
    if tokens < node.size:
        raise ValueError(
            f"tokens must be at least {node.size}, as many as {node.kind} holds, so that it is full; got {tokens}"
        )
    return node.entry_BEC if isinstance(node, StaticWindow) else _longer(node.entry_BEC, node.size)


def _longer(empty_BFC: Tensor, entries: int) -> Tensor:
    return empty_BFC.new_empty(empty_BFC.shape[0], entries, empty_BFC.shape[2])


def _ratio(entry: Any) -> int:
    return entry.ratio


def _counted(count_B: Tensor | None, slots: int) -> Tensor | None:
    return None if count_B is None else count_B.fill_(slots)
