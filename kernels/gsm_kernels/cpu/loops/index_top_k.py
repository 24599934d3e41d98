"""Compute the index scores of a row from the products of its heads, and choose the k highest exactly.

Slots are distributed over 8 k lanes. The k-th highest of the lanes' maxima is a lower bound of the k-th highest score.
Only scores that reach it are partitioned to find the k-th highest score. A pass in ascending order then takes all slots
with higher scores, and the first slots with an equal score. Both passes skip runs of slots without a high score.
"""

from __future__ import annotations

import numpy as np

from ..arrays import floats, integers
from ..native import compiled, part

RUN = 32  # slots that are compared together
LANES = 8  # lanes per chosen slot: with 8, about 7 % more than k scores reach the bound
HEADS = 4  # heads that are read together
LOWEST = np.float32(np.finfo(np.float32).min)  # lowest score that can be chosen
ZERO, INFINITE = np.float32(0), np.float32(np.inf)


@part
def _score(fired_JF, weight_J, low, high, score_F):
    """Write score = sum_j weight_j relu(fired_j) of slots low to high; -inf in place of NaN."""
    for f in range(low, high):
        score_F[f] = ZERO
    heads = weight_J.shape[0]
    for j in range(0, heads - HEADS + 1, HEADS):
        w0, w1, w2, w3 = weight_J[j], weight_J[j + 1], weight_J[j + 2], weight_J[j + 3]
        fired0, fired1, fired2, fired3 = fired_JF[j], fired_JF[j + 1], fired_JF[j + 2], fired_JF[j + 3]
        for f in range(low, high):
            upper = w0 * max(fired0[f], ZERO) + w1 * max(fired1[f], ZERO)
            score_F[f] += upper + (w2 * max(fired2[f], ZERO) + w3 * max(fired3[f], ZERO))
    for j in range(heads // HEADS * HEADS, heads):
        weight, fired_F = weight_J[j], fired_JF[j]
        for f in range(low, high):
            score_F[f] += weight * max(fired_F[f], ZERO)
    for f in range(low, high):
        if score_F[f] != score_F[f]:
            score_F[f] = -INFINITE


@part
def _reaches(score, start, stop, bound):
    """Return whether any score from start to stop reaches the bound."""
    hit = False
    for f in range(start, stop):
        hit |= score[f] >= bound
    return hit


@part
def _bound(score, low, high, k, held):
    """Return a lower bound of the k-th highest score: the k-th highest maximum of a lane, or LOWEST for few slots."""
    lanes = LANES * k
    if high - low < 2 * lanes:
        return LOWEST
    best = held[:lanes]
    best[:] = score[low : low + lanes]
    for start in range(low + lanes, high, lanes):
        some = score[start : min(start + lanes, high)]
        for lane in range(some.shape[0]):
            best[lane] = max(best[lane], some[lane])
    return max(LOWEST, np.partition(best, lanes - k)[lanes - k])


@part
def _choose(score, low, high, k, held, chosen_K):
    """Write the places from low to high of the k highest scores above -inf, ascending, then -1."""
    threshold, count, equals = _bound(score, low, high, k, held), 0, k
    for start in range(low, high, RUN):
        stop = min(start + RUN, high)
        if _reaches(score, start, stop, threshold):
            for f in range(start, stop):
                held[count] = score[f]
                count += score[f] >= threshold
    if count > k:
        threshold = np.partition(held[:count], count - k)[count - k]
        for f in range(count):
            equals -= held[f] > threshold
    written = 0
    for start in range(low, high, RUN):
        stop = min(start + RUN, high)
        if written < k and _reaches(score, start, stop, threshold):
            for f in range(start, stop):
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
    """Write the chosen slots of rows begin to end of a chunk; `members` is the size of a pool, -1 without pools."""
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
    """Write the k blocks with the highest maxima of rows begin to end. Blocks are counted from a row's first slot; the
    newest is always chosen."""
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
