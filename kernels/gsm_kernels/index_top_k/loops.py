"""Index scores of a row, of what its heads have fired, and the exact choice among them.

The k-th highest of the maxima of small groups is a bound: only scores that reach it are partitioned, to find the k-th
highest. A sweep in ascending order then takes what lies above that, and of its equals the first.
"""

from __future__ import annotations

import numpy as np

from ..arrays import floats, integers
from ..native import compiled

GROUP = 8  # slots
LOWEST = np.finfo(np.float32).min  # of what can be chosen
ZERO, INFINITE = np.float32(0), np.float32(np.inf)


@compiled
def _score(fired_JF, weight_J, low, high, score_F):
    """sum_j weight_j relu(fired_j) of slots low to high."""
    for f in range(low, high):
        score_F[f] = ZERO
    for j in range(weight_J.shape[0]):
        weight, fired_F = weight_J[j], fired_JF[j]
        for f in range(low, high):
            score_F[f] += weight * max(fired_F[f], ZERO)


@compiled
def _choose(score, low, high, k, held, chosen_K):
    """Writes the places in low to high of the k highest scores above -inf, ascending, then -1; where a score is not a
    number, -1 alone."""
    broken = False
    for f in range(low, high):
        broken |= score[f] != score[f]
    if broken:
        high = low
    bound, groups = np.float32(LOWEST), (high - low) // GROUP
    if groups > k:
        for group in range(groups):
            best = score[low + group * GROUP]
            for f in range(low + group * GROUP + 1, low + (group + 1) * GROUP):
                best = max(best, score[f])
            held[group] = best
        bound = max(bound, np.partition(held[:groups], groups - k)[groups - k])
    count = 0
    for f in range(low, high):
        held[count] = score[f]
        count += score[f] >= bound
    threshold, equals = bound, k
    if count > k:
        threshold = np.partition(held[:count], count - k)[count - k]
        for f in range(count):
            equals -= held[f] > threshold
    written = 0
    for f in range(low, high):
        if score[f] > threshold or (score[f] == threshold and equals > 0):
            equals -= score[f] == threshold
            chosen_K[written] = f
            written += 1
    for place in range(written, k):
        chosen_K[place] = -1


@compiled
def top_k(
    begin, end, rows, row0, all_rows, slots, heads, k, members, block, fired_at, weight_at, first_at, last_at, pool_at,
    chosen_at,
):  # fmt: skip
    """The slots that rows begin to end of a chunk choose; `members` blocks are in the pool of each (-1: no pool)."""
    sequences = (end - 1) // rows + 1
    fired_NJF, weight_BRJ = floats(fired_at, (end, heads, slots)), floats(weight_at, (sequences, all_rows, heads))
    first_BR, last_BR = integers(first_at, (sequences, all_rows)), integers(last_at, (sequences, all_rows))
    pool_BRN = integers(pool_at, (sequences, all_rows, max(members, 0)))
    chosen_BRK = integers(chosen_at, (sequences, all_rows, k))
    score_F, held_F, seen_F = np.empty(slots, np.float32), np.empty(slots + 1, np.float32), np.empty(slots, np.bool_)
    for n in range(begin, end):
        b, r = n // rows, row0 + n % rows
        low, high = max(first_BR[b, r], 0), min(last_BR[b, r], slots)
        _score(fired_NJF[n], weight_BRJ[b, r], low, high, score_F)
        if members >= 0:
            seen_F[:] = False
            for ordinal in pool_BRN[b, r]:
                if ordinal >= 0:
                    start = first_BR[b, r] + ordinal * block
                    for f in range(max(start, low), min(start + block, high)):
                        seen_F[f] = True
            for f in range(low, high):
                if not seen_F[f]:
                    score_F[f] = -INFINITE
        _choose(score_F, low, high, k, held_F, chosen_BRK[b, r])


@compiled
def blocks(
    begin, end, rows, row0, all_rows, slots, heads, k, block, fired_at, weight_at, first_at, last_at, chosen_at
):  # fmt: skip
    """The k blocks with the highest maxima, counted from a row's first slot; the newest is always among them."""
    sequences, count = (end - 1) // rows + 1, -(-slots // block)
    fired_NJF, weight_BRJ = floats(fired_at, (end, heads, slots)), floats(weight_at, (sequences, all_rows, heads))
    first_BR, last_BR = integers(first_at, (sequences, all_rows)), integers(last_at, (sequences, all_rows))
    chosen_BRK = integers(chosen_at, (sequences, all_rows, k))
    score_F, best_N, held_N = np.empty(slots, np.float32), np.empty(count, np.float32), np.empty(count + 1, np.float32)
    for n in range(begin, end):
        b, r = n // rows, row0 + n % rows
        low, high = max(first_BR[b, r], 0), min(last_BR[b, r], slots)
        _score(fired_NJF[n], weight_BRJ[b, r], low, high, score_F)
        best_N[:] = -INFINITE
        for f in range(low, high):
            ordinal = (f - low) // block
            best_N[ordinal] = max(best_N[ordinal], score_F[f])
        if high > low:
            best_N[(high - 1 - low) // block] = INFINITE
        _choose(best_N, 0, count, k, held_N, chosen_BRK[b, r])
