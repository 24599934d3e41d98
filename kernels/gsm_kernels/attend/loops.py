"""The loops behind `gsm_kernels.attend` and `attend_band` on a CPU.

A block is a few neighbouring queries; its lanes are their heads, query by query, so that one instruction works on
eight of them or more. Scores lie with the lanes last, entry by entry: first those of the window of all the block's
queries, then those of the picks, which are other entries for every query. So maxima and sums are taken lane by lane,
and all products are those of `multiply`, which reads entries as they lie.

    score[i, m]         = window[low + i] . query[m]                -inf where the row does not see the entry
    score[near + k, m]  = bank[index[m's query, k]] . query[m]      -inf where there is no entry

Backward computes the softmax again. With g the rotated gradient of what was mixed, weights p and entries e,

    d score = p (e . g - sum p e . g)      d query = sum d score e      d e = sum over lanes d score query + p g
"""

from __future__ import annotations

import numpy as np

from ..arrays import add, exp, floats, integers, multiply, read
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
def _reach(position_R, place0, count, heads, width, begin, end):
    """The first entry that the block sees, and how many there are; and which of them, counted from the first, each lane
    sees first and last. The first is after the last where nothing is seen."""
    low, high = place0 + count, np.int64(-1)
    for r in range(count):
        place = place0 + r
        since = max(place - min(position_R[r], width - 1), 0)
        if since <= place:
            low, high = min(low, since), place
        for m in range(r * heads, (r + 1) * heads):
            begin[m], end[m] = since, place
    for m in range(count * heads):
        begin[m] -= low
        end[m] -= low
    for m in range(count * heads, begin.shape[0]):
        begin[m], end[m] = 1, 0
    return low, max(high + 1 - low, 0)


@compiled
def _load(query_at, factor, count, heads, channels, pairs, cos_RP, sin_RP, natural, lanes_last):
    """The rotated vectors of a block, times a factor, lane by lane and with the lanes last."""
    for r in range(count):
        cos, sin = cos_RP[r], sin_RP[r]
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
def _room(sizes, sink_at):
    """Memory for a block: its queries as lanes, entries that cannot be read as they lie, scores, and lane by lane what
    is seen, the sink, and the softmax."""
    entries, heads, channels, width, picks, queries, window_size = (
        sizes[1],
        sizes[2],
        sizes[3],
        sizes[5],
        sizes[7],
        sizes[8],
        sizes[10],
    )
    lanes, wide = -(-queries * heads // LANES) * LANES, -(-channels // 16) * 16
    stride, reach = lanes + 16, queries + min(width, entries) - 1
    natural, lanes_last = np.zeros((lanes, wide), np.float32), np.zeros((channels, stride), np.float32)
    copied = np.zeros((0 if window_size == 4 and channels == wide else reach, wide), np.float32)
    picked, score = np.zeros((queries, picks, wide), np.float32), np.empty((reach + picks, stride), np.float32)
    begin, end = np.empty(lanes, np.int32), np.empty(lanes, np.int32)
    sink, sink_H = np.zeros(lanes, np.float32), floats(sink_at, (heads,))
    for m in range(queries * heads):
        sink[m] = sink_H[m % heads]
    high, total = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    return natural, lanes_last, copied, picked, score, begin, end, sink, high, total


@compiled
def _products(sizes, batch, start, count, near, near_at, picked_at, lanes_at, stride, score_at):
    """The products of all entries that a block may see with its lanes."""
    heads, channels, picks = sizes[2], sizes[3], sizes[7]
    wide = -(-channels // 16) * 16
    multiply(near_at, wide, 1, lanes_at, stride, score_at, stride, near, channels, count * heads, False)
    for r in range(count if picks else 0):
        at, lane, into = picked_at + 4 * r * picks * wide, lanes_at + 4 * r * heads, score_at + 4 * near * stride
        multiply(at, wide, 1, lane, stride, into + 4 * r * heads, stride, picks, channels, heads, False)


@compiled
def _weights(sizes, batch, row, count, query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at,
             room):  # fmt: skip
    """Fills in the room of a block; returns its first entry, how many there are, and where they lie."""
    rows, entries, heads, channels, pairs, width, slots, picks, queries = sizes[:9]
    window_step, window_size, bank_step, bank_size = sizes[9:]
    natural, lanes_last, copied, picked, score, begin, end, sink, high, total = room
    (lanes, wide), stride, start = natural.shape, lanes_last.shape[1], batch * rows + row
    cos_RP, sin_RP = (
        floats(cos_at + 4 * start * pairs, (count, pairs)),
        floats(sin_at + 4 * start * pairs, (count, pairs)),
    )
    factor = ONE / np.sqrt(np.float32(channels))
    _load(
        query_at + 4 * start * heads * channels,
        factor,
        count,
        heads,
        channels,
        pairs,
        cos_RP,
        sin_RP,
        natural,
        lanes_last,
    )
    position_R = integers(position_at + 8 * start, (count,))
    low, near = _reach(position_R, entries - rows + row, count, heads, width, begin, end)
    near_at = window_at + (batch * window_step + low * channels) * window_size
    if copied.shape[0]:
        for i in range(near):
            read(near_at + i * channels * window_size, window_size, channels, copied.ctypes.data + 4 * i * wide)
        near_at = copied.ctypes.data
    for r in range(count if picks else 0):
        index_K = integers(index_at + 8 * (start + r) * picks, (picks,))
        at = picked.ctypes.data + 4 * r * picks * wide
        _pick(bank_at + batch * bank_step * bank_size, bank_size, slots, index_K, channels, wide, at)
    at, picked_at = score.ctypes.data, picked.ctypes.data
    _products(sizes, batch, start, count, near, near_at, picked_at, lanes_last.ctypes.data, stride, at)
    for r in range(count if picks else 0):
        index_K = integers(index_at + 8 * (start + r) * picks, (picks,))
        bias_row = bias_at + 4 * (start + r) * picks if bias_at else 0
        _hide(index_K, bias_row, slots, heads, floats(at + 4 * near * stride, (picks, stride)), r * heads)
    for k in range(near, near + picks):
        for m in range(count * heads, lanes):
            score[k, m] = NOTHING
    _softmax(near, picks, lanes, stride, at, begin, end, sink, high, total)
    return low, near, near_at


@compiled
def _mix(sizes, count, near, near_at, picked_at, weight_at, stride, mixed_at):
    """The sum of entries, by weights, for every lane."""
    heads, channels, picks = sizes[2], sizes[3], sizes[7]
    wide = -(-channels // 16) * 16
    for i in range(0, max(near, 1), PART):
        part, at, weight = min(PART, near - i), near_at + 4 * i * wide, weight_at + 4 * i * stride
        multiply(weight, 1, stride, at, wide, mixed_at, wide, count * heads, part, channels, i > 0)
    for r in range(count if picks else 0):
        weight, lane = weight_at + 4 * (near * stride + r * heads), mixed_at + 4 * r * heads * wide
        multiply(weight, 1, stride, picked_at + 4 * r * picks * wide, wide, lane, wide, heads, picks, channels, True)


@compiled
def _write(mixed, factor, sizes, start, count, cos_at, sin_at, out_at):
    """Writes what the lanes have mixed, each times its factor, rotated back."""
    heads, channels, pairs = sizes[2:5]
    for r in range(start, start + count):
        cos, sin = floats(cos_at + 4 * r * pairs, (pairs,)), floats(sin_at + 4 * r * pairs, (pairs,))
        for h in range(heads):
            lane = (r - start) * heads + h
            result, out = mixed[lane], floats(out_at + 4 * (r * heads + h) * channels, (channels,))
            _turn(result, channels, pairs, cos, sin, -ONE)
            share = factor[lane]
            for c in range(channels):
                out[c] = result[c] * share


@compiled
def forward(
    first, last, rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size,
    bank_step, bank_size, query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at, sink_at, out_at,
):  # fmt: skip
    """What blocks of queries take; blocks are those of a sequence, then those of the next."""
    sizes = (rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size, bank_step,
             bank_size)  # fmt: skip
    room = _room(sizes, sink_at)
    natural, lanes_last, _, picked, score, _, _, _, _, total = room
    blocks, stride, mixed = -(-rows // queries), lanes_last.shape[1], np.zeros(natural.shape, np.float32)
    for item in range(first, last):
        batch, row = item // blocks, item % blocks * queries
        count = min(queries, rows - row)
        _, near, near_at = _weights(
            sizes, batch, row, count, query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at, room
        )
        _mix(sizes, count, near, near_at, picked.ctypes.data, score.ctypes.data, stride, mixed.ctypes.data)
        for m in range(total.shape[0]):
            total[m] = ONE / total[m]
        _write(mixed, total, sizes, batch * rows + row, count, cos_at, sin_at, out_at)


@compiled
def _score_grad(near, picks, lanes, stride, score_at, grad_at, total, delta):
    """Turns weights that are not divided yet into those that are, and the entries' products with the gradient into the
    gradients of scores."""
    for group in range(0, lanes, LANES):
        sum_, along = total[group : group + LANES], delta[group : group + LANES]
        for m in range(LANES):
            sum_[m] = ONE / sum_[m]
            along[m] = ZERO
        for i in range(near + picks):
            at = 4 * (i * stride + group)
            weight, grad = floats(score_at + at, (LANES,)), floats(grad_at + at, (LANES,))
            for m in range(LANES):
                share = weight[m] * sum_[m]
                weight[m] = share
                along[m] += share * grad[m]
        for i in range(near + picks):
            at = 4 * (i * stride + group)
            weight, grad = floats(score_at + at, (LANES,)), floats(grad_at + at, (LANES,))
            for m in range(LANES):
                grad[m] = weight[m] * (grad[m] - along[m])


@compiled
def backward(
    first, last, rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size,
    bank_step, bank_size, query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at, sink_at,
    parts, part_rows, part_entries, out_grad_at, query_grad_at, window_grad_at, sink_grad_at, bank_grad_at,
    bias_grad_at,
):  # fmt: skip
    """The gradients of parts of sequences. Those of entries are added to what is there, for each part elsewhere: every
    part's, of the entries from the first that its rows may see on."""
    sizes = (rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size, bank_step,
             bank_size)  # fmt: skip
    room = _room(sizes, sink_at)
    natural, lanes_last, _, picked, score, _, _, sink, high, total = room
    (lanes, wide), stride = natural.shape, lanes_last.shape[1]
    grads, grads_last, grad = np.zeros_like(natural), np.zeros_like(lanes_last), np.empty_like(score)
    mixed, delta, pick_grad = np.zeros_like(natural), np.empty_like(total), np.empty((picks, wide), np.float32)
    factor = np.empty_like(total)
    factor[:] = ONE / np.sqrt(np.float32(channels))
    score_at, grad_at, picked_at = score.ctypes.data, grad.ctypes.data, picked.ctypes.data
    query, given = natural.ctypes.data, grads.ctypes.data
    for item in range(first, last):
        batch, part = item // parts, item % parts
        base = max(entries - rows + part * part_rows - (min(width, entries) - 1), 0)
        sink_grad = floats(sink_grad_at + 4 * item * heads, (heads,))
        window_grad, bank_grad = window_grad_at + 4 * item * part_entries * wide, bank_grad_at + 4 * item * slots * wide
        for row in range(part * part_rows, min((part + 1) * part_rows, rows), queries):
            count, start = min(queries, min((part + 1) * part_rows, rows) - row), batch * rows + row
            low, near, near_at = _weights(
                sizes,
                batch,
                row,
                count,
                query_at,
                window_at,
                bank_at,
                index_at,
                bias_at,
                position_at,
                cos_at,
                sin_at,
                room,
            )
            cos_RP, sin_RP = (
                floats(cos_at + 4 * start * pairs, (count, pairs)),
                floats(sin_at + 4 * start * pairs, (count, pairs)),
            )
            _load(
                out_grad_at + 4 * start * heads * channels,
                ONE,
                count,
                heads,
                channels,
                pairs,
                cos_RP,
                sin_RP,
                grads,
                grads_last,
            )
            _products(sizes, batch, start, count, near, near_at, picked_at, grads_last.ctypes.data, stride, grad_at)
            _score_grad(near, picks, lanes, stride, score_at, grad_at, total, delta)
            for m in range(count * heads):
                sink_grad[m % heads] -= exp(sink[m] - high[m]) * total[m] * delta[m]
            _mix(sizes, count, near, near_at, picked_at, grad_at, stride, mixed.ctypes.data)
            _write(mixed, factor, sizes, start, count, cos_at, sin_at, query_grad_at)
            into = window_grad + 4 * (low - base) * wide
            multiply(grad_at, stride, 1, query, wide, into, wide, near, count * heads, channels, True)
            multiply(score_at, stride, 1, given, wide, into, wide, near, count * heads, channels, True)
            for r in range(count if picks else 0):
                lane, weight, add_at = 4 * r * heads, 4 * (near * stride + r * heads), pick_grad.ctypes.data
                multiply(
                    grad_at + weight, stride, 1, query + lane * wide, wide, add_at, wide, picks, heads, channels, False
                )
                multiply(
                    score_at + weight, stride, 1, given + lane * wide, wide, add_at, wide, picks, heads, channels, True
                )
                index_K = integers(index_at + 8 * (start + r) * picks, (picks,))
                for k in range(picks):
                    if 0 <= index_K[k] < slots:
                        add(add_at + 4 * k * wide, wide, bank_grad + 4 * index_K[k] * wide)
                if bias_grad_at:
                    bias_grad = floats(bias_grad_at + 4 * (start + r) * picks, (picks,))
                    for k in range(picks):
                        sum_ = ZERO
                        for m in range(r * heads, (r + 1) * heads):
                            sum_ += grad[near + k, m]
                        bias_grad[k] = sum_
