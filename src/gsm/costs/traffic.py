"""What ranks send each other that divide sequences among themselves, counted from what a model keeps of the past.

With N ranks, B sequences of T tokens, P pieces of L tokens (P = N, or 2 N for a model without recurrent states):

    window of E entries      E to the piece after, where another rank has it
    bank, one slot for m     ceil(L / m) a piece, to N - 1 ranks
    recurrent state          all of it, to the rank after

Backward sends the gradients of all that back the way it came: as much again. Recomputed layers send twice. What is here
is a sum over ranks of a forward pass in training; experts' loads and the number of targets are a few numbers besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gsm.cache.memory import Memory, map_nodes
from gsm.cache.pieces import owner
from gsm.cache.store import Column, State, Window
from gsm.models.base import LanguageModel
from gsm.models.geometry import Geometry


class Sent(NamedTuple):
    """What one kind of store sends.

    Attributes:
        kind: of the stores, as a memory's bytes are called (``encoder_window``).
        how: ``routed``, ``gathered`` or ``passed_on``, as in ``gsm.exchange``.
        calls: collectives that every rank takes part in.
        bytes: from one rank to another, all ranks together.
    """

    kind: str
    how: str
    calls: int
    bytes: int


def sent(model: LanguageModel, *, batch: int, tokens: int, ranks: int, number_bytes: int) -> list[Sent]:
    """What a forward pass in training sends, by kind.

    Args:
        batch: sequences that the ranks divide.
        tokens: of each.
        ranks: that divide them.
        number_bytes: of an entry's number, 2 in bfloat16; states are kept in at least 4.
    """
    each = model.pieces_each
    length = -(-tokens // (each * ranks))
    found: dict[tuple[str, str], list[int]] = {}
    for store in _stores(model.start()):
        if isinstance(store, Window):
            how, numbers = "routed", _halos(store.size, length, each, ranks) * store.entry_BEC.shape[-1]
        elif isinstance(store, Column):
            slots = ranks * each * -(-length // store.ratio)
            how, numbers = "gathered", slots * (ranks - 1) * store.value_BFC.shape[-1]
        else:
            how, numbers = "passed_on", (ranks - 1) * math.prod(store.value_BHRC.shape[1:])
        one = found.setdefault((store.kind, how), [0, 0])
        one[0] += 1
        one[1] += numbers * batch * (max(number_bytes, 4) if how == "passed_on" else number_bytes)
    return [Sent(*key, *numbers) for key, numbers in found.items() if numbers[1]]


def ring(geometry: Geometry, *, batch: int, tokens: int, ranks: int, number_bytes: int) -> int:
    """The same of ring attention in a dense Transformer of such depth, heads and widths, each head with keys and values
    of its own: they pass through all ranks but the last. Backward sends them once more, and their gradients beside
    them: twice as much as forward."""
    length = -(-tokens // ranks)
    numbers = 2 * geometry.heads * geometry.entry_dim * length * ranks * (ranks - 1)
    return geometry.depth * numbers * batch * number_bytes


def _stores(memory: Memory) -> Iterator[Window | Column | State]:
    """All of them, in order."""
    found: list[Window | Column | State] = []
    map_nodes(memory, (Window, Column, State), found.append)
    yield from found


def _halos(size: int, length: int, each: int, ranks: int) -> int:
    """Entries that travel so that every piece has ``size`` before it."""
    entries = 0
    for piece in range(1, each * ranks):
        first = piece * length - size
        for source in range(max(0, first) // length, piece):
            travels = owner(source, ranks, each)[0] != owner(piece, ranks, each)[0]
            entries += travels * ((source + 1) * length - max(first, source * length))
    return entries
