"""The loops behind `gsm_kernels.attend` and `attend_band` on a CPU.

A block is a few neighbouring queries; its lanes are their heads, query by query, so that one instruction works on
eight of them. Scores lie with the lanes last, entry by entry: first the window of all the block's queries, then the
picks, which are other entries for every query. So maxima and sums are taken lane by lane, and all products
are those of `multiply`, for which entries are read as they lie.

    near[i, m]  = window[low + i] . query[m]                  -inf where the row does not see the entry
    far[k, m]   = bank[index[m's query, k]] . query[m]        -inf where there is no entry
"""

from __future__ import annotations

import numpy as np

from ..arrays import exp, floats, integers, multiply, read
from ..native import compiled

LANES = 32  # of which a loop has a constant number
PART = 128  # entries that are mixed at a time: so many stay in the nearest cache
ZERO, ONE = np.float32(0), np.float32(1)
NOTHING, LOWEST = np.float32(-np.inf), np.float32(-1e30)  # the second: a maximum before anything was seen


@compiled
def _turn(vector, channels, pairs, cos, sin, sign):
    """Rotates the last pairs of channels."""
    begin = channels - 2 * pairs
    for p in range(pairs):
        a, b, turned = vector[begin + 2 * p], vector[begin + 2 * p + 1], sign * sin[p]
        vector[begin + 2 * p] = a * cos[p] - b * turned
        vector[begin + 2 * p + 1] = a * turned + b * cos[p]


@compiled
def _softmax(near, far, lanes, stride, scores_at, begin, end, sink, high, total):
    """Turns scores into exp(score - high), high being a lane's maximum, and sums these up, that of the sink included."""
    for group in range(0, lanes, LANES):
        top, sum_ = floats(high.ctypes.data + 4 * group, (LANES,)), floats(total.ctypes.data + 4 * group, (LANES,))
        first, last, bottom = begin[group : group + LANES], end[group : group + LANES], sink[group : group + LANES]
        for m in range(LANES):
            top[m] = max(bottom[m], LOWEST)
        for i in range(near):
            score, place = floats(scores_at + 4 * (i * stride + group), (LANES,)), np.int32(i)
            for m in range(LANES):
                seen = (first[m] <= place) & (place <= last[m])
                score[m] = score[m] if seen else NOTHING
                top[m] = score[m] if score[m] > top[m] else top[m]
        for i in range(near, near + far):
            score = floats(scores_at + 4 * (i * stride + group), (LANES,))
            for m in range(LANES):
                top[m] = score[m] if score[m] > top[m] else top[m]
        for m in range(LANES):
            sum_[m] = exp(bottom[m] - top[m])
        for i in range(near + far):
            score = floats(scores_at + 4 * (i * stride + group), (LANES,))
            for m in range(LANES):
                weight = exp(score[m] - top[m])
                score[m] = weight
                sum_[m] += weight


@compiled
def _reach(position_R, row, count, heads, before, width, begin, end):
    """The first and last stream place that every lane sees; returns those of the whole block. The first is after the
    last where nothing is seen."""
    low, high = before + row + count, np.int64(-1)
    for r in range(count):
        place = before + row + r
        since = max(place - min(position_R[row + r], width - 1), 0)
        if since <= place:
            low, high = min(low, since), place
        for m in range(r * heads, (r + 1) * heads):
            begin[m], end[m] = since, place
    for m in range(count * heads, begin.shape[0]):
        begin[m], end[m] = 1, 0
    return low, high


@compiled
def _load(query_at, factor, count, heads, channels, pairs, cos_RP, sin_RP, row, natural, lanes_last):
    """The rotated vectors of a block, times a factor, lane by lane and with the lanes last."""
    for r in range(count):
        cos, sin = cos_RP[row + r], sin_RP[row + r]
        for m in range(r * heads, (r + 1) * heads):
            given, vector = floats(query_at + 4 * m * channels, (channels,)), natural[m]
            for c in range(channels):
                vector[c] = given[c] * factor
            _turn(vector, channels, pairs, cos, sin, ONE)
    for c in range(channels):
        into = lanes_last[c]
        for m in range(count * heads):
            into[m] = natural[m, c]


@compiled
def _pick(bank_at, bank_size, slots, index_K, channels, wide, picked_at):
    """Copies the entries that one query has picked; of those that are none, the first."""
    for k in range(index_K.shape[0]):
        slot = index_K[k] if 0 <= index_K[k] < slots else 0
        read(bank_at + slot * channels * bank_size, bank_size, channels, picked_at + 4 * k * wide)


@compiled
def _hide(index_K, bias_at, slots, heads, score_KM, first):
    """Adds the bias to the scores of one query's picks, and hides those that are none."""
    bias_K = floats(bias_at, index_K.shape)
    for k in range(index_K.shape[0]):
        score = score_KM[k]
        if not 0 <= index_K[k] < slots:
            for m in range(first, first + heads):
                score[m] = NOTHING
        elif bias_at:
            for m in range(first, first + heads):
                score[m] += bias_K[k]


@compiled
def forward(
    first, last, rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size,
    bank_step, bank_size, query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at, sink_at, out_at,
):  # fmt: skip
    """Blocks of queries, those of a sequence after one another."""
    blocks, wide = -(-rows // queries), -(-channels // 16) * 16
    lanes = -(-queries * heads // LANES) * LANES
    stride, reach = lanes + 16, queries + min(width, entries) - 1
    sink_H, factor = floats(sink_at, (heads,)), ONE / np.sqrt(np.float32(channels))
    whole = window_size == 4 and channels == wide
    natural, lanes_last = np.zeros((lanes, wide), np.float32), np.zeros((channels, stride), np.float32)
    copied = np.zeros((1 if whole else reach, wide), np.float32)
    picked = np.zeros((queries, picks, wide), np.float32)
    score, mixed = np.empty((reach + picks, stride), np.float32), np.zeros((lanes, wide), np.float32)
    begin, end = np.empty(lanes, np.int32), np.empty(lanes, np.int32)
    sink, high, total = np.zeros(lanes, np.float32), np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for m in range(queries * heads):
        sink[m] = sink_H[m % heads]
    for item in range(first, last):
        batch, row = item // blocks, item % blocks * queries
        count = min(queries, rows - row)
        start = batch * rows + row
        position_R = integers(position_at + 8 * batch * rows, (rows,))
        cos_RP = floats(cos_at + 4 * batch * rows * pairs, (rows, pairs))
        sin_RP = floats(sin_at + 4 * batch * rows * pairs, (rows, pairs))
        line = 4 * start * heads * channels
        _load(query_at + line, factor, count, heads, channels, pairs, cos_RP, sin_RP, row, natural, lanes_last)
        low, high_place = _reach(position_R, row, count, heads, entries - rows, width, begin, end)
        near = max(high_place + 1 - low, 0)
        for m in range(lanes):
            begin[m] -= low
            end[m] -= low
        near_at = window_at + (batch * window_step + low * channels) * window_size
        if not whole:
            for i in range(near):
                read(near_at + i * channels * window_size, window_size, channels, copied.ctypes.data + 4 * i * wide)
            near_at = copied.ctypes.data
        query, scores = lanes_last.ctypes.data, score.ctypes.data
        multiply(near_at, wide, 1, query, stride, scores, stride, near, channels, count * heads, False)
        far = scores + 4 * near * stride
        for r in range(count if picks else 0):
            index_K = integers(index_at + 8 * (start + r) * picks, (picks,))
            at, lane = picked.ctypes.data + 4 * r * picks * wide, 4 * r * heads
            _pick(bank_at + batch * bank_step * bank_size, bank_size, slots, index_K, channels, wide, at)
            multiply(at, wide, 1, query + lane, stride, far + lane, stride, picks, channels, heads, False)
            bias_row = bias_at + 4 * (start + r) * picks if bias_at else 0
            _hide(index_K, bias_row, slots, heads, floats(far, (picks, stride)), r * heads)
        for k in range(near, near + picks):
            for m in range(count * heads, lanes):
                score[k, m] = NOTHING
        _softmax(near, picks, lanes, stride, scores, begin, end, sink, high, total)
        into = mixed.ctypes.data
        for i in range(0, max(near, 1), PART):
            part, at = min(PART, near - i), near_at + 4 * i * wide
            multiply(scores + 4 * i * stride, 1, stride, at, wide, into, wide, count * heads, part, channels, i > 0)
        for r in range(count if picks else 0):
            weight, lane, at = far + 4 * r * heads, into + 4 * r * heads * wide, picked.ctypes.data + 4 * r * picks * wide
            multiply(weight, 1, stride, at, wide, lane, wide, heads, picks, channels, True)
        for r in range(count):
            cos, sin = cos_RP[row + r], sin_RP[row + r]
            for m in range(r * heads, (r + 1) * heads):
                result, out, share = mixed[m], floats(out_at + line + 4 * m * channels, (channels,)), ONE / total[m]
                _turn(result, channels, pairs, cos, sin, -ONE)
                for c in range(channels):
                    out[c] = result[c] * share
