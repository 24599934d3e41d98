"""Kernels that do one thing each, for `micro`. What they compute is checked, so nothing of it can be left out.

Numbers that are only counted are int32: their sums wrap around, are the same in any order, and need one addition each.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["blocks", "turns"])
def read(source_ptr, out_ptr, blocks, turns, BLOCK: tl.constexpr, CACHE: tl.constexpr):
    """Add up `blocks` blocks of int32 [BLOCK], `turns` times, in a line of out [programs, BLOCK] for each program.

    With every turn another program takes a block: no load is one that was made before in its program.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for turn in range(turns):
        for block in range((tl.program_id(0) + turn) % tl.num_programs(0), blocks, tl.num_programs(0)):
            total += tl.load(source_ptr + (block * BLOCK + lane), cache_modifier=CACHE)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + lane, total)


@triton.jit(do_not_specialize=["rows"])
def gather(
    bank_ptr,
    index_ptr,
    out_ptr,
    rows,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    PICKS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Add up the entries int32 [WORDS] at index [row, K] of `rows` neighbouring rows, in out [programs, WORDS].

    A tile is PICKS entries, as attention gathers them.
    """
    pick, word = tl.arange(0, PICKS), tl.arange(0, WORDS)
    total = tl.zeros((PICKS, WORDS), tl.int32)
    for row in range(tl.program_id(0) * rows, tl.program_id(0) * rows + rows):
        for start in range(0, K, PICKS):
            slot = tl.load(index_ptr + (row * K + start + pick))
            total += tl.load(bank_ptr + (slot[:, None] * WORDS + word[None, :]), cache_modifier=CACHE)
    tl.store(out_ptr + tl.program_id(0) * WORDS + word, tl.sum(total, 0))


@triton.jit(do_not_specialize=["turns"])
def multiply(left_ptr, right_ptr, out_ptr, turns, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out [programs, M, N] = `turns` times left [M, K] @ right [K, N], which are loaded once."""
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(left_ptr + row[:, None] * K + inner[None, :])
    right = tl.load(right_ptr + inner[:, None] * N + column[None, :])
    total = tl.zeros((M, N), tl.float32)
    for _ in range(turns):
        total = tl.dot(left, right, total)
    tl.store(out_ptr + tl.program_id(0) * M * N + row[:, None] * N + column[None, :], total)


@triton.jit
def count(total_ptr, EARLY: tl.constexpr):
    """total += 1. EARLY: begins while the kernel before it still runs, and waits for what that has written."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(total_ptr)
    tl.debug_barrier()  # all threads have read it
    tl.store(total_ptr, total + 1)
