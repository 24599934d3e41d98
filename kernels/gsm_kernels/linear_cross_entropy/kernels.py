"""Triton kernel of the cross-entropy of rows of logits, which overwrites the logits by their gradient.

V is the vocabulary; arithmetic is in float32.
"""

import triton
import triton.language as tl


@triton.jit
def load(logit_ptr, column, stride, V: tl.constexpr):
    """Return some logits of a row, -1e30 beyond V. The padding is read and replaced instead of masked, because a thread
    loads 16 bytes at once only if they have one mask."""
    logit = tl.load(logit_ptr + column, mask=column < stride, other=0.0)
    return tl.where(column < V, logit, -1e30)


@triton.jit
def loss_and_gradient(
    logit_ptr, grad_ptr, target_ptr, loss_ptr,
    logit_stride, grad_stride, ignore_index, lift,
    V: tl.constexpr, BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write the loss of one row, and lift * (softmax - one_hot(target)); both are 0 if the target is ignored.

    The gradient overwrites the logits, from the same address, in elements of the same or half the size. So gradient j
    is stored at or before logit j, and a block overwrites only itself or earlier blocks. A barrier ensures that all of
    a block is read before its first store. The padding, up to `logit_stride` columns, is written too.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    counted = target != ignore_index
    logit_ptr += row * logit_stride
    # A kernel cannot raise an error, so a target outside the vocabulary makes the loss NaN.
    valid = (target >= 0) & (target < V)
    at_target = tl.load(logit_ptr + target, mask=valid, other=float("nan"))
    block = tl.arange(0, BLOCK)
    # Each lane has its own maximum and sum, which are combined at the end of the row.
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + block
        logit = load(logit_ptr, column, logit_stride, V)
        ratio = tl.exp(-tl.abs(logit - top))
        total = tl.where(logit > top, total * ratio + 1, total + ratio)
        top = tl.maximum(top, logit)
    peak = tl.max(top, 0)
    normalizer = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    tl.store(loss_ptr + row, tl.where(counted, normalizer - at_target, 0.0))
    if GRADIENT:
        grad_ptr += row * grad_stride
        lift = tl.where(counted, lift, 0.0)
        logit = load(logit_ptr, block, logit_stride, V)
        for start in range(0, V, BLOCK):
            column = start + block
            following = load(logit_ptr, column + BLOCK, logit_stride, V)  # prefetch
            softmax = tl.exp(logit - normalizer)
            tl.debug_barrier()
            tl.store(grad_ptr + column, lift * (softmax - (column == target)), mask=column < logit_stride)
            logit = following
