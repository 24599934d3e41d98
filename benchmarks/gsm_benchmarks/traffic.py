"""Traffic between the ranks of context parallelism, computed from the stores of a model.

With N ranks, B sequences of T tokens, P pieces of L tokens (P = N, or 2 N for a model without recurrent states):

    window of E entries      E entries to the next piece, if it is on another rank
    bank, one slot for m     ceil(L / m) slots per piece, to N - 1 ranks
    recurrent state          the whole state, to the next rank

The backward sends the gradients back, which is the same number of bytes. Recomputed layers send twice. The functions
return sums over ranks for a forward pass in training, without the loads of experts and the number of targets, which are
a few numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gsm.cache.memory import holds, map_nodes
from gsm.cache.store import Column, RecurrentState, Window
from gsm.models.base import LanguageModel
from gsm.models.geometry import Geometry


class Sent(NamedTuple):
    """The traffic of one kind of store.

    Attributes:
        kind: kind of the stores, as in ``Memory.breakdown`` (``encoder_window``).
        how: ``routed``, ``gathered`` or ``passed_on``, as in ``gsm.context``.
        calls: number of collectives.
        bytes: bytes between ranks, summed over all ranks.
    """

    kind: str
    how: str
    calls: int
    bytes: int


def sent(model: LanguageModel, *, batch: int, tokens: int, ranks: int, number_bytes: int) -> list[Sent]:
    """Return the traffic of a forward pass in training, by kind of store.

    Args:
        model: the model.
        batch: number of sequences.
        tokens: tokens per sequence.
        ranks: number of ranks that divide the sequences.
        number_bytes: bytes per element of an entry, 2 in bfloat16; states have at least 4.
    """
    each = 1 if holds(model.start(), RecurrentState) else 2
    length = -(-tokens // (each * ranks))
    stores: list[Window | Column | RecurrentState] = []
    map_nodes(model.start(), (Window, Column, RecurrentState), stores.append)
    traffic: dict[tuple[str, str], list[int]] = {}
    for store in stores:
        if isinstance(store, Window):
            how, numbers = "routed", _halos(store.size, length, each, ranks) * store.entry_BEC.shape[-1]
        elif isinstance(store, Column):
            slots = ranks * each * -(-length // store.ratio)
            how, numbers = "gathered", slots * (ranks - 1) * store.value_BFC.shape[-1]
        else:
            how, numbers = "passed_on", (ranks - 1) * math.prod(store.value_BHRC.shape[1:])
        calls_and_bytes = traffic.setdefault((store.kind, how), [0, 0])
        calls_and_bytes[0] += 1
        calls_and_bytes[1] += numbers * batch * (max(number_bytes, 4) if how == "passed_on" else number_bytes)
    return [Sent(*key, *numbers) for key, numbers in traffic.items() if numbers[1]]


def ring(geometry: Geometry, *, batch: int, tokens: int, ranks: int, number_bytes: int) -> int:
    """Return the bytes of ring attention in a dense Transformer of the same depth, heads and widths, for comparison.

    Each head has its own keys and values, which pass through all ranks but the last. The backward sends them once more,
    with their gradients: twice the bytes of the forward.
    """
    length = -(-tokens // ranks)
    numbers = 2 * geometry.heads * geometry.entry_dim * length * ranks * (ranks - 1)
    return geometry.depth * numbers * batch * number_bytes


def _halos(size: int, length: int, each: int, ranks: int) -> int:
    """Return the entries sent between ranks so that every piece has the ``size`` entries before it."""
    entries = 0
    for piece in range(1, each * ranks):
        first = piece * length - size
        for source in range(max(0, first) // length, piece):
            travels = _rank(source, ranks) != _rank(piece, ranks)
            entries += travels * ((source + 1) * length - max(first, source * length))
    return entries


def _rank(piece: int, ranks: int) -> int:
    """Return the rank that has a piece: pieces go to all ranks in order, then back."""
    return min(piece, 2 * ranks - 1 - piece)
