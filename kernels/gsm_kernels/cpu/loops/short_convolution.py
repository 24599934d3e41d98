"""The short convolution, row by row: the earlier tokens that a row reads are still in the cache from the rows before.

The filters are laid out channels last, once a call, so that all inner loops run along neighbouring channels.
"""

from __future__ import annotations

import numpy as np

from ..arrays import floats, integers
from ..native import compiled, part


@part
def _channels_last(weight, taps):
    """Write the first filters of a weight [C, W] to `taps`, channels last."""
    for back in range(taps.shape[0]):
        tap = taps[back]
        for i in range(tap.size):
            tap[i] = weight[i, back]


@compiled
def forward(first, last, batch, length, entries, channels, width, seen_at, weight_at, position_at, out_at):
    """The sum for new tokens first to last, counted through all sequences."""
    seen, out = floats(seen_at, (batch, entries, channels)), floats(out_at, (batch, length, channels))
    position, taps = integers(position_at, (batch, length)), np.empty((min(width, entries), channels), np.float32)
    _channels_last(floats(weight_at, (channels, width)), taps)
    for n in range(first, last):
        b, t = n // length, n % length
        place, into = entries - length + t, out[b, t]
        reach = min(position[b, t], taps.shape[0] - 1, place)
        if reach < 0:
            for i in range(channels):
                into[i] = np.float32(0)
            continue
        entry, tap = seen[b, place], taps[0]
        for i in range(channels):
            into[i] = entry[i] * tap[i]
        for back in range(1, reach + 1):
            entry, tap = seen[b, place - back], taps[back]
            for i in range(channels):
                into[i] += entry[i] * tap[i]


@compiled
def backward(
    first, last, rows, batch, length, entries, channels, width,
    grad_at, seen_at, weight_at, position_at, seen_grad_at, part_at,
):  # fmt: skip
    """The gradient of seen, and of the weight, as [W, C], the part that comes from each block of `rows` entries, blocks
    first to last."""
    grad, seen = floats(grad_at, (batch, length, channels)), floats(seen_at, (batch, entries, channels))
    seen_grad, part = floats(seen_grad_at, (batch, entries, channels)), floats(part_at, (last, width, channels))
    position, taps = integers(position_at, (batch, length)), np.empty((min(width, entries), channels), np.float32)
    _channels_last(floats(weight_at, (channels, width)), taps)
    for block in range(first, last):
        weight_grad = part[block]
        for back in range(width):
            into = weight_grad[back]
            for i in range(channels):
                into[i] = np.float32(0)
        for n in range(block * rows, min((block + 1) * rows, batch * entries)):
            b, e = n // entries, n % entries
            entry, into = seen[b, e], seen_grad[b, e]
            for i in range(channels):
                into[i] = np.float32(0)
            for back in range(taps.shape[0]):
                t = e - entries + length + back  # the new token that sees this entry so far back
                if t < 0 or t >= length or position[b, t] < back:
                    continue
                pull, tap, tap_grad = grad[b, t], taps[back], weight_grad[back]
                for i in range(channels):
                    into[i] += pull[i] * tap[i]
                    tap_grad[i] += pull[i] * entry[i]
