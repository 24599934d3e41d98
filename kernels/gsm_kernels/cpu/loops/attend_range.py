"""The loops of `gsm_kernels.attend_range` on a CPU, for a few rows that read keys and values directly from a cache.

An item is a share of the slots of one row. The loop is an online softmax over PART slots at a time: the scores of all
heads, then the weights relative to the largest score so far, then the weighted sum of values. `combine` joins the
shares of a row.
"""

from __future__ import annotations

import numpy as np

from ..arrays import dots, exp, floats, integers, multiply, peak, read
from ..native import compiled, part

PART = 64  # slots at a time; `peak` takes this number of scores
SHARES = 16  # largest number of shares of a row's slots
# Typed constants, because `multiply` would be compiled again for a Python number.
LINE, UNIT, SIXTEEN, MORE = np.int64(PART), np.int64(1), np.int64(16), np.bool_(True)
ZERO, ONE = np.float32(0), np.float32(1)
NOTHING, LOWEST = np.float32(-np.inf), np.float32(-1e30)  # the score of no slot; the initial maximum


@part
def _share(first, last, slots, share):
    """Return the range of slots of a share. The size of shares depends only on the number of visible slots; the last
    shares may be empty."""
    low, high = max(first, 0), min(last, slots)
    size = max(-(-max(high - low, 0) // (SHARES * 16)) * 16, PART)
    return low + share * size, min(low + (share + 1) * size, high)


@part
def _sixteen(at, count, step, numbers, size, spare):
    """Return the address of sixteen slots, and their distance in bytes. Slots are copied if there are fewer than
    sixteen, or if they are not in float32."""
    if count >= 16 and size == 4:
        return at, step
    for i in range(16):
        if i < count:
            read(at + i * step, size, numbers, spare + 4 * i * numbers)
        else:
            nothing = floats(spare + 4 * i * numbers, (numbers,))
            for c in range(numbers):
                nothing[c] = ZERO
    return spare, 4 * numbers


@part
def _weigh(heads, channels, score_at, top, total, mixed):
    """Replace scores by exp(score - maximum) and sum these; rescale earlier sums if the maximum has grown."""
    for h in range(heads):
        score, before, after = floats(score_at + 4 * h * PART, (PART,)), top[h], peak(score_at + 4 * h * PART)
        if not after <= before:
            fade, row = exp(before - after), mixed[h]
            top[h] = after
            total[h] *= fade
            for c in range(channels):
                row[c] *= fade
        largest, weights = top[h], ZERO
        for i in range(PART):
            weight = exp(score[i] - largest)
            score[i] = weight
            weights += weight
        total[h] += weights


@compiled
def combine(first, last, rows, shares, heads, channels, part_at, out_at):
    """Write the outputs of rows first to last from the results of their shares; 0 if a row sees no slot."""
    part, out = floats(part_at, (shares, rows, heads * (channels + 2))), floats(out_at, (rows, heads, channels))
    for row in range(first, last):
        for h in range(heads):
            into, high, total = out[row, h], NOTHING, ZERO
            for share in range(shares):
                top = part[share, row, h]
                high = top if not top <= high else high
            for c in range(channels):
                into[c] = ZERO
            if high == NOTHING:
                continue
            for share in range(shares):
                sums = part[share, row]
                if sums[h] != NOTHING:
                    fade, mixed = exp(sums[h] - high), sums[2 * heads + h * channels :]
                    total += sums[heads + h] * fade
                    for c in range(channels):
                        into[c] += mixed[c] * fade
            for c in range(channels):
                into[c] /= total


@compiled
def forward(
    first, last, rows, shares, each, slots, heads, groups, channels, size, batch_step, slot_step,
    query_at, key_at, value_at, first_at, last_at, part_at, out_at,
):  # fmt: skip
    """Write the results of items first to last: for every head, the largest score, the sum of weights, and the weighted
    sum of values. Items are the first shares of all rows, then the second, and so on. If one call computes all items,
    it also writes the outputs of the rows."""
    shared, numbers, width, step = heads // groups, groups * channels, heads * channels, slot_step * size
    memory = np.empty(width + heads * PART + 16 * numbers, np.float32)
    own_at = np.int64(memory.ctypes.data)
    score_at = own_at + 4 * width
    spare = score_at + 4 * heads * PART
    scaled, score = floats(own_at, (width,)), floats(score_at, (heads, PART))
    since, until = integers(first_at, (rows,)), integers(last_at, (rows,))
    scale = ONE / np.sqrt(np.float32(channels))
    for item in range(first, last):
        row = item % rows
        low, high = _share(since[row], until[row], slots, item // rows)
        sums_at = part_at + 4 * item * (width + 2 * heads)
        top, total = floats(sums_at, (heads,)), floats(sums_at + 4 * heads, (heads,))
        for h in range(heads):
            top[h], total[h] = LOWEST if low < high else NOTHING, ZERO
        if low >= high:
            continue
        mixed_at, query = sums_at + 8 * heads, floats(query_at + 4 * row * width, (width,))
        mixed, all_mixed = floats(mixed_at, (heads, channels)), floats(mixed_at, (width,))
        for c in range(width):
            scaled[c], all_mixed[c] = query[c] * scale, ZERO
        for begin in range(low, high, PART):
            count, entry = min(PART, high - begin), (row // each * batch_step + begin * slot_step) * size
            for i in range(0, count, 16):
                at, apart = _sixteen(key_at + entry + i * step, count - i, step, numbers, size, spare)
                dots(groups, shared, channels, own_at, at, apart, score_at + 4 * i, PART)
            for h in range(heads if count < PART else 0):
                line = score[h]
                for i in range(count, PART):
                    line[i] = NOTHING
            _weigh(heads, channels, score_at, top, total, mixed)
            for i in range(0, count, 16):
                at, apart = _sixteen(value_at + entry + i * step, count - i, step, numbers, size, spare)
                for g in range(groups):
                    h, value = g * shared, at + 4 * g * channels
                    weights, into = score_at + 4 * (h * PART + i), mixed_at + 4 * h * channels
                    multiply(weights, LINE, UNIT, value, apart // 4, into, channels, shared, SIXTEEN, channels, MORE)
    if first == 0 and last == rows * shares:
        combine(0, rows, rows, shares, heads, channels, part_at, out_at)
    memory[0] = ZERO  # keeps the array alive, of which only the address is used
