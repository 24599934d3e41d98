"""Sums over the places that point at a slot. One program per slot."""

import triton
import triton.language as tl


@triton.jit
def add_segments(
    value_ptr, order_ptr, start_ptr, into_ptr,
    X: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """into[slot] += sum of the values at the slot's places, in their order."""
    slot = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(start_ptr + slot), tl.load(start_ptr + slot + 1)
    channel = tl.arange(0, WIDTH)
    total = tl.zeros((PLACES, WIDTH), tl.float32)
    for at in range(begin, end, PLACES):
        number = at + tl.arange(0, PLACES)
        place = tl.load(order_ptr + number, mask=number < end, other=0)
        inside = (number < end)[:, None] & (channel < X)[None, :]
        total += tl.load(value_ptr + place[:, None] * X + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    before = tl.load(into_ptr + slot * X + channel, mask=channel < X, other=0.0)
    tl.store(into_ptr + slot * X + channel, before + tl.sum(total, 0), mask=channel < X)
