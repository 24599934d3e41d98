"""The loops of `gsm_kernels.attend` and `attend_band` on a CPU.

A block is a few neighbouring queries. Its lanes m are their heads, query by query, so that one instruction computes
eight of them or more. Scores have the lanes last: first the window entries that any query of the block sees, then the
picks, which differ by query. `multiply` computes all products, and maxima and sums are taken per lane.

    score[i, m]         = window[low + i] . query[m]                -inf where the row does not see the entry
    score[near + k, m]  = bank[index[m's query, k]] . query[m]      -inf where there is no entry

Backward computes the softmax again. With g the rotated gradient of the output, weights p and entries e,

    d score = p (e . g - sum p e . g)      d query = sum d score e      d e = sum over lanes d score query + p g
"""

from __future__ import annotations

import numpy as np

from ..arrays import add, exp, floats, integers, multiply, read
from ..native import compiled, part

LANES = 32  # constant, so that loops over lanes are vectorised
PART = 128  # entries that are mixed at a time, so that they stay in the L1 cache
ZERO, ONE = np.float32(0), np.float32(1)
# Typed constants, because `multiply` would be compiled again for a Python number.
UNIT, NEW, MORE = np.int64(1), np.bool_(False), np.bool_(True)
NOTHING, LOWEST = np.float32(-np.inf), np.float32(-1e30)  # LOWEST is the smallest sink: the maximum is finite

# The numbers of a lane: the first and the last entry of the block that it sees; the sink's logit; the maximum and the
# denominator of the softmax; the weighted mean of the entries' products with the gradient.
FIRST, LAST, SINK, HIGH, TOTAL, MEAN = range(6)


@part
def _shape(sizes):
    """Return the number of lanes, the strides of scores and of vectors in elements, and the most window entries of a
    block."""
    entries, heads, channels, width, queries = sizes[1], sizes[2], sizes[3], sizes[5], sizes[8]
    lanes = -(-queries * heads // LANES) * LANES
    return lanes, lanes + 16, -(-channels // 16) * 16, queries + min(width, entries) - 1


@part
def _room(sizes, sink_at):
    """Return the memory of a block: the array, and the addresses in it of the queries (vector by vector, and with the
    lanes last), of copies of the window entries and of the picks, of the scores, and of the numbers of the lanes."""
    lanes, stride, wide, reach = _shape(sizes)
    heads, channels, picks, queries = sizes[2], sizes[3], sizes[7], sizes[8]
    vectors, turned, window, bank = lanes * wide, channels * stride, reach * wide, queries * picks * wide
    memory = np.zeros(vectors + turned + window + bank + (reach + picks) * stride + 6 * lanes, np.float32)
    natural = np.int64(memory.ctypes.data)
    last = natural + 4 * vectors
    copied = last + 4 * turned
    picked = copied + 4 * window
    score = picked + 4 * bank
    table = score + 4 * (reach + picks) * stride
    lane, sink_H = floats(table, (6, lanes)), floats(sink_at, (heads,))
    for q in range(queries):
        for h in range(heads):
            lane[SINK, q * heads + h] = LOWEST if sink_H[h] < LOWEST else sink_H[h]
    return memory, (natural, last, copied, picked, score, table)


@part
def _turn(vector_at, channels, pairs, cos_at, sin_at, sign):
    """Rotate the last pairs of channels of a vector, forwards (sign 1) or back (-1)."""
    cos, sin = floats(cos_at, (pairs,)), floats(sin_at, (pairs,))
    pair = floats(vector_at + 4 * (channels - 2 * pairs), (pairs, 2))
    for p in range(pairs):
        a, b, turned = pair[p, 0], pair[p, 1], sign * sin[p]
        pair[p, 0] = a * cos[p] - b * turned
        pair[p, 1] = a * turned + b * cos[p]


@part
def _load(vectors_at, factor, sizes, start, count, cos_at, sin_at, natural, last):
    """Read the vectors of a block's rows, multiply by a factor, and rotate them."""
    heads, channels, pairs = sizes[2], sizes[3], sizes[4]
    _, stride, wide, _ = _shape(sizes)
    for r in range(count):
        cos, sin = cos_at + 4 * (start + r) * pairs, sin_at + 4 * (start + r) * pairs
        for m in range(r * heads, (r + 1) * heads):
            source = floats(vectors_at + 4 * (start * heads + m) * channels, (channels,))
            vector = floats(natural + 4 * m * wide, (channels,))
            for c in range(channels):
                vector[c] = source[c] * factor
            _turn(natural + 4 * m * wide, channels, pairs, cos, sin, ONE)
    vector, turned = floats(natural, (count * heads, wide)), floats(last, (channels, stride))
    for c in range(channels):
        for m in range(count * heads):
            turned[c, m] = vector[m, c]


@part
def _write(mixed, factor, sizes, start, count, cos_at, sin_at, vectors_at):
    """Rotate the vectors of a block's rows back, multiply each by its lane's factor, and write them."""
    heads, channels, pairs = sizes[2], sizes[3], sizes[4]
    lanes, _, wide, _ = _shape(sizes)
    share = floats(factor, (lanes,))
    for r in range(count):
        cos, sin = cos_at + 4 * (start + r) * pairs, sin_at + 4 * (start + r) * pairs
        for m in range(r * heads, (r + 1) * heads):
            _turn(mixed + 4 * m * wide, channels, pairs, cos, sin, -ONE)
            vector = floats(mixed + 4 * m * wide, (channels,))
            out = floats(vectors_at + 4 * (start * heads + m) * channels, (channels,))
            times = share[m]
            for c in range(channels):
                out[c] = vector[c] * times


@part
def _reach(sizes, batch, row, count, position_at, table):
    """Return the first entry that the block sees, and the number of entries. Write the first and the last entry that
    each lane sees, counted from the block's first; first > last if the lane sees none."""
    rows, entries, heads, width = sizes[0], sizes[1], sizes[2], sizes[5]
    lanes, _, _, _ = _shape(sizes)
    position, lane = integers(position_at + 8 * (batch * rows + row), (count,)), floats(table, (6, lanes))
    low, high, before = entries, 0, entries - rows + row
    for r in range(count):
        since = max(before + r - min(position[r], width - 1), 0)
        if since <= before + r:
            low, high = min(low, since), before + r + 1
    for m in range(lanes):
        lane[FIRST, m], lane[LAST, m] = ONE, ZERO
    for r in range(count):
        since = max(before + r - min(position[r], width - 1), 0)
        for m in range(r * heads, (r + 1) * heads):
            lane[FIRST, m], lane[LAST, m] = np.float32(since - low), np.float32(before + r - low)
    return low, max(high - low, 0)


@part
def _softmax(near, far, lanes, stride, score_at, table):
    """Replace scores by exp(score - maximum), and sum these, including the sink."""
    for group in range(0, lanes, LANES):
        first, last = floats(table + 4 * group, (LANES,)), floats(table + 4 * (LAST * lanes + group), (LANES,))
        bottom = floats(table + 4 * (SINK * lanes + group), (LANES,))
        top = floats(table + 4 * (HIGH * lanes + group), (LANES,))
        total = floats(table + 4 * (TOTAL * lanes + group), (LANES,))
        for m in range(LANES):
            top[m] = bottom[m]
        for i in range(near):
            score, place = floats(score_at + 4 * (i * stride + group), (LANES,)), np.float32(i)
            for m in range(LANES):
                seen = (first[m] <= place) & (place <= last[m])
                score[m] = score[m] if seen else NOTHING
                top[m] = score[m] if score[m] > top[m] else top[m]
        for i in range(near, near + far):
            score = floats(score_at + 4 * (i * stride + group), (LANES,))
            for m in range(LANES):
                top[m] = score[m] if score[m] > top[m] else top[m]
        for m in range(LANES):
            total[m] = exp(bottom[m] - top[m])
        for i in range(near + far):
            score = floats(score_at + 4 * (i * stride + group), (LANES,))
            for m in range(LANES):
                weight = exp(score[m] - top[m])
                score[m] = weight
                total[m] += weight


@part
def _products(sizes, count, near, near_at, picked, last, score_at):
    """Write the products of the lanes with all entries that the block sees."""
    heads, channels, picks = sizes[2], sizes[3], sizes[7]
    _, stride, wide, _ = _shape(sizes)
    multiply(near_at, wide, UNIT, last, stride, score_at, stride, near, channels, count * heads, NEW)
    for r in range(count if picks else 0):
        at, lane, into = picked + 4 * r * picks * wide, last + 4 * r * heads, score_at + 4 * (near * stride + r * heads)
        multiply(at, wide, UNIT, lane, stride, into, stride, picks, channels, heads, NEW)


@part
def _mix(sizes, count, near, near_at, picked, weight_at, mixed):
    """Write the weighted sum of entries of every lane."""
    heads, channels, picks = sizes[2], sizes[3], sizes[7]
    _, stride, wide, _ = _shape(sizes)
    for i in range(0, max(near, 1), PART):
        part, at, weight = min(PART, near - i), near_at + 4 * i * wide, weight_at + 4 * i * stride
        multiply(weight, UNIT, stride, at, wide, mixed, wide, count * heads, part, channels, MORE if i else NEW)
    for r in range(count if picks else 0):
        at, lane, weight = picked + 4 * r * picks * wide, mixed + 4 * r * heads * wide, weight_at + 4 * near * stride
        multiply(weight + 4 * r * heads, UNIT, stride, at, wide, lane, wide, heads, picks, channels, MORE)


@part
def _pick(sizes, batch, start, count, bank_at, index_at, picked):
    """Copy the entries picked by the rows of a block; for index -1, the first entry."""
    channels, slots, picks, bank_step, bank_size = sizes[3], sizes[6], sizes[7], sizes[11], sizes[12]
    _, _, wide, _ = _shape(sizes)
    index, bank = integers(index_at + 8 * start * picks, (count * picks,)), bank_at + batch * bank_step * bank_size
    for k in range(count * picks):
        slot = index[k] if 0 <= index[k] < slots else 0
        read(bank + slot * channels * bank_size, bank_size, channels, picked + 4 * k * wide)


@part
def _hide(sizes, start, count, index_at, bias_at, score_at):
    """Add the bias to the scores of picks; set scores of missing picks and of lanes without a query to -inf."""
    heads, slots, picks = sizes[2], sizes[6], sizes[7]
    lanes, stride, _, _ = _shape(sizes)
    score, index = floats(score_at, (picks, stride)), integers(index_at + 8 * start * picks, (count, picks))
    bias = floats(bias_at + 4 * start * picks, (count, picks))
    for k in range(picks):
        for r in range(count):
            if not 0 <= index[r, k] < slots:
                for m in range(r * heads, (r + 1) * heads):
                    score[k, m] = NOTHING
            elif bias_at:
                more = bias[r, k]
                for m in range(r * heads, (r + 1) * heads):
                    score[k, m] += more
        for m in range(count * heads, lanes):
            score[k, m] = NOTHING


@part
def _weights(sizes, batch, row, count, given, room):
    """Compute the softmax weights of a block; return its first window entry, their number, and their address."""
    query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at = given
    channels, picks, window_step, window_size = sizes[3], sizes[7], sizes[9], sizes[10]
    natural, last, copied, picked, score, table = room
    lanes, stride, wide, _ = _shape(sizes)
    start = batch * sizes[0] + row
    factor = ONE / np.sqrt(np.float32(channels))
    _load(query_at, factor, sizes, start, count, cos_at, sin_at, natural, last)
    low, near = _reach(sizes, batch, row, count, position_at, table)
    near_at = window_at + (batch * window_step + low * channels) * window_size
    if window_size != 4 or channels != wide:
        for i in range(near):
            read(near_at + i * channels * window_size, window_size, channels, copied + 4 * i * wide)
        near_at = copied
    if picks:
        _pick(sizes, batch, start, count, bank_at, index_at, picked)
    _products(sizes, count, near, near_at, picked, last, score)
    if picks:
        _hide(sizes, start, count, index_at, bias_at, score + 4 * near * stride)
    _softmax(near, picks, lanes, stride, score, table)
    return low, near, near_at


@compiled
def forward(
    first, last, rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size,
    bank_step, bank_size, query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at, sink_at, out_at,
):  # fmt: skip
    """Write the outputs of blocks first to last, counted over all sequences."""
    sizes = (rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size, bank_step,
             bank_size)  # fmt: skip
    lanes, _, wide, _ = _shape(sizes)
    blocks, memory = -(-rows // queries), np.zeros((lanes, wide), np.float32)
    mixed = np.int64(memory.ctypes.data)
    lane_numbers, room = _room(sizes, sink_at)
    picked, score, table = room[3:]
    total = floats(table + 4 * TOTAL * lanes, (lanes,))
    addresses = (query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at)
    for item in range(first, last):
        batch, row = item // blocks, item % blocks * queries
        count = min(queries, rows - row)
        _, near, near_at = _weights(sizes, batch, row, count, addresses, room)
        _mix(sizes, count, near, near_at, picked, score, mixed)
        for m in range(lanes):
            total[m] = ONE / total[m]
        _write(mixed, table + 4 * TOTAL * lanes, sizes, batch * rows + row, count, cos_at, sin_at, out_at)
    lane_numbers[0], memory[0, 0] = ZERO, ZERO  # keeps the arrays alive, of which only the addresses are used


@part
def _score_grad(near, far, lanes, stride, score_at, grad_at, table):
    """Divide the weights by their sums; replace the entries' products with the gradient by the scores' gradients."""
    for group in range(0, lanes, LANES):
        total = floats(table + 4 * (TOTAL * lanes + group), (LANES,))
        mean = floats(table + 4 * (MEAN * lanes + group), (LANES,))
        for m in range(LANES):
            total[m] = ONE / total[m]
            mean[m] = ZERO
        for i in range(near + far):
            at = 4 * (i * stride + group)
            weight, grad = floats(score_at + at, (LANES,)), floats(grad_at + at, (LANES,))
            for m in range(LANES):
                share = weight[m] * total[m]
                weight[m] = share
                mean[m] += share * grad[m]
        for i in range(near + far):
            at = 4 * (i * stride + group)
            weight, grad = floats(score_at + at, (LANES,)), floats(grad_at + at, (LANES,))
            for m in range(LANES):
                grad[m] = weight[m] * (grad[m] - mean[m])


@part
def _add_picks(sizes, start, count, index_at, grad, score, query, given, into, bank_grad_at, bias_grad_at):
    """Add the contributions of a block's picks to the gradient of the bank; write the gradient of the bias."""
    heads, channels, slots, picks = sizes[2], sizes[3], sizes[6], sizes[7]
    _, stride, wide, _ = _shape(sizes)
    index, grads = integers(index_at + 8 * start * picks, (count, picks)), floats(grad, (picks, stride))
    bias_grad = floats(bias_grad_at + 4 * start * picks, (count, picks))
    for r in range(count):
        lane = 4 * r * heads
        multiply(grad + lane, stride, UNIT, query + lane * wide, wide, into, wide, picks, heads, channels, NEW)
        multiply(score + lane, stride, UNIT, given + lane * wide, wide, into, wide, picks, heads, channels, MORE)
        for k in range(picks):
            slot = index[r, k]
            if 0 <= slot < slots:
                add(into + 4 * k * wide, wide, bank_grad_at + 4 * slot * wide)
            if bias_grad_at:
                total = ZERO
                for m in range(r * heads, (r + 1) * heads):
                    total += grads[k, m]
                bias_grad[r, k] = total


@compiled
def backward(
    first, last, rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size,
    bank_step, bank_size, query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at, sink_at,
    parts, part_rows, part_entries, out_grad_at, query_grad_at, window_grad_at, sink_grad_at, bank_grad_at,
    bias_grad_at,
):  # fmt: skip
    """Write the gradients of parts first to last of the rows. Each part has its own buffer for the gradients of entries
    and sinks; its window begins at the first entry that its rows may see."""
    sizes = (rows, entries, heads, channels, pairs, width, slots, picks, queries, window_step, window_size, bank_step,
             bank_size)  # fmt: skip
    lanes, stride, wide, reach = _shape(sizes)
    lane_numbers, room = _room(sizes, sink_at)
    query, _, _, picked, score, table = room
    vectors, turned, scores = lanes * wide, channels * stride, (reach + picks) * stride
    memory = np.zeros(2 * vectors + turned + scores + picks * wide + lanes, np.float32)
    grads = np.int64(memory.ctypes.data)
    grads_last = grads + 4 * vectors
    mixed = grads_last + 4 * turned
    grad = mixed + 4 * vectors
    pick_grad = grad + 4 * scores
    factor = pick_grad + 4 * picks * wide
    memory[-lanes:] = ONE / np.sqrt(np.float32(channels))
    lane = floats(table, (6, lanes))
    addresses = (query_at, window_at, bank_at, index_at, bias_at, position_at, cos_at, sin_at)
    for item in range(first, last):
        batch, part = item // parts, item % parts
        since = max(entries - rows + part * part_rows - (min(width, entries) - 1), 0)
        sink_grad = floats(sink_grad_at + 4 * item * heads, (heads,))
        window_grad, bank_grad = window_grad_at + 4 * item * part_entries * wide, bank_grad_at + 4 * item * slots * wide
        end = min((part + 1) * part_rows, rows)
        for row in range(part * part_rows, end, queries):
            count, start = min(queries, end - row), batch * rows + row
            low, near, near_at = _weights(sizes, batch, row, count, addresses, room)
            _load(out_grad_at, ONE, sizes, start, count, cos_at, sin_at, grads, grads_last)
            _products(sizes, count, near, near_at, picked, grads_last, grad)
            _score_grad(near, picks, lanes, stride, score, grad, table)
            for r in range(count):
                for h in range(heads):
                    m = r * heads + h
                    sink_grad[h] -= exp(lane[SINK, m] - lane[HIGH, m]) * lane[TOTAL, m] * lane[MEAN, m]
            _mix(sizes, count, near, near_at, picked, grad, mixed)
            _write(mixed, factor, sizes, start, count, cos_at, sin_at, query_grad_at)
            into = window_grad + 4 * (low - since) * wide
            multiply(grad, stride, UNIT, query, wide, into, wide, near, count * heads, channels, MORE)
            multiply(score, stride, UNIT, grads, wide, into, wide, near, count * heads, channels, MORE)
            if picks:
                far, weight = grad + 4 * near * stride, score + 4 * near * stride
                _add_picks(sizes, start, count, index_at, far, weight, query, grads, pick_grad, bank_grad, bias_grad_at)
    lane_numbers[0], memory[0] = ZERO, ZERO  # keeps the arrays alive, of which only the addresses are used
