"""Cross-entropy of rows of logits, and its gradient written over them. V is the vocabulary; all in float32."""

import triton
import triton.language as tl


@triton.jit
def load(logit_ptr, column, stride, V: tl.constexpr):
    """Return the logits of a row. A thread reads 16 bytes at a time only where all of them have the same mask. So the
    padding is read too, and becomes -1e30."""
    logit = tl.load(logit_ptr + column, mask=column < stride, other=0.0)
    return tl.where(column < V, logit, -1e30)


@triton.jit
def loss_and_gradient(
    logit_ptr, grad_ptr, target_ptr, loss_ptr,
    logit_stride, grad_stride, ignore_index, lift,
    V: tl.constexpr, BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """The loss of one row, and lift * (softmax - one at the target); both are 0 where the target is ignored.

    The gradient's row begins where the logits' row does, in numbers that may be half as wide. So the gradient of column
    j lies at or before the logit j: a block overwrites itself or blocks that have been read. The barrier makes sure
    that all of a block is read before its first store. The padding, up to `logit_stride` columns, is written too.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    counted = target != ignore_index
    logit_ptr += row * logit_stride
    # A kernel cannot raise: a target outside the vocabulary makes the loss not a number.
    valid = (target >= 0) & (target < V)
    at_target = tl.load(logit_ptr + target, mask=valid, other=float("nan"))
    block = tl.arange(0, BLOCK)
    # Every lane has a maximum and a sum of its own; they meet once, at the end of the row.
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
            following = load(logit_ptr, column + BLOCK, logit_stride, V)  # on its way while the others arrive
            softmax = tl.exp(logit - normalizer)
            tl.debug_barrier()
            tl.store(grad_ptr + column, lift * (softmax - (column == target)), mask=column < logit_stride)
            logit = following
