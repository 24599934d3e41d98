"""Triton kernels that sum the places of a slot, in parts of at most MOST places. See `gsm_kernels.inverse`."""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots"])  # otherwise Triton builds variants by divisibility by 16
def add_parts(
    value_ptr, order_ptr, start_ptr, first_ptr, slot_ptr, sum_ptr, into_ptr, slots,
    MOST: tl.constexpr, X: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Sum the places of one part in order. Add the sum to its slot if this is the slot's only part; else store it for
    `join_parts`."""
    part = tl.program_id(0)
    slot = tl.load(slot_ptr + part).to(tl.int64)
    if slot < slots:
        first = tl.load(first_ptr + slot)
        begin = tl.load(start_ptr + slot) + (part - first) * MOST
        end = tl.minimum(begin + MOST, tl.load(start_ptr + slot + 1))
        channel = tl.arange(0, WIDTH)
        total = tl.zeros((LINES, WIDTH), tl.float32)
        for at in range(begin, end, LINES):
            number = at + tl.arange(0, LINES)
            place = tl.load(order_ptr + number, mask=number < end, other=0).to(tl.int64)
            inside = (number < end)[:, None] & (channel < X)[None, :]
            total += tl.load(value_ptr + place[:, None] * X + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        whole = tl.sum(total, 0)
        if tl.load(first_ptr + slot + 1) == first + 1:
            line = into_ptr + slot * X + channel
            tl.store(line, tl.load(line, mask=channel < X, other=0.0) + whole, mask=channel < X)
        else:
            tl.store(sum_ptr + part.to(tl.int64) * X + channel, whole, mask=channel < X)


@triton.jit
def join_parts(
    sum_ptr, first_ptr, into_ptr,
    X: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Add the stored sums of a slot with several parts to the slot, in order."""
    slot = tl.program_id(0).to(tl.int64)
    first, last = tl.load(first_ptr + slot), tl.load(first_ptr + slot + 1)
    if last > first + 1:
        channel = tl.arange(0, WIDTH)
        total = tl.zeros((LINES, WIDTH), tl.float32)
        for at in range(first, last, LINES):
            part = (at + tl.arange(0, LINES)).to(tl.int64)
            inside = (part < last)[:, None] & (channel < X)[None, :]
            total += tl.load(sum_ptr + part[:, None] * X + channel[None, :], mask=inside, other=0.0)
        line = into_ptr + slot * X + channel
        tl.store(line, tl.load(line, mask=channel < X, other=0.0) + tl.sum(total, 0), mask=channel < X)
