"""Pooling of groups of tokens. N = B * F groups, F of a sequence; arithmetic is in float32.

A program has ROWS groups and BLOCK channels. Values and gates are read with their strides, since they may be halves of
one projection. Without a gate, where RATIO is 1, the gate's arguments are there and not used.
"""

import triton
import triton.language as tl


@triton.jit
def member(from_NC, token_N, stride, live_NC):
    """One token of every group; `from_NC` points to the first token of its sequence."""
    at_NC = from_NC + (tl.maximum(token_N, 0) * stride)[:, None]
    return tl.load(at_NC, mask=live_NC, other=0.0).to(tl.float32)


@triton.jit
def pool(value_from_NC, gate_from_NC, end_N, value_stride, gate_stride, live_NC, RATIO: tl.constexpr):
    """The pooled values, and the logarithm of the softmax's denominator (0 for a group of one)."""
    if RATIO == 1:
        pooled_NC = member(value_from_NC, end_N, value_stride, live_NC)
        normalizer_NC = tl.zeros_like(pooled_NC)
    else:
        top_NC = tl.full(live_NC.shape, -1e30, tl.float32)
        total_NC = tl.zeros(live_NC.shape, tl.float32)
        pooled_NC = tl.zeros(live_NC.shape, tl.float32)
        for back in tl.range(0, RATIO, loop_unroll_factor=2):
            gate_NC = member(gate_from_NC, end_N - back, gate_stride, live_NC)
            value_NC = member(value_from_NC, end_N - back, value_stride, live_NC)
            higher_NC = tl.maximum(top_NC, gate_NC)
            kept_NC, weight_NC = tl.exp(top_NC - higher_NC), tl.exp(gate_NC - higher_NC)
            total_NC = total_NC * kept_NC + weight_NC
            pooled_NC = pooled_NC * kept_NC + weight_NC * value_NC
            top_NC = higher_NC
        pooled_NC = pooled_NC / total_NC
        normalizer_NC = top_NC + tl.log(total_NC)
    return pooled_NC, normalizer_NC


@triton.jit(do_not_specialize=["F", "N"])  # channels lie together, whatever the number of groups
def forward(
    value_ptr, gate_ptr, end_ptr, out_ptr,
    value_batch, value_stride, gate_batch, gate_stride, F, N,
    C: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The pooled groups; zeros where there is none."""
    group_N = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end_N = tl.load(end_ptr + group_N, mask=group_N < N, other=-1)
    live_NC = (end_N >= 0)[:, None] & (channel_C < C)[None, :]
    value_from_NC = value_ptr + (group_N // F * value_batch)[:, None] + channel_C[None, :]
    gate_from_NC = gate_ptr + (group_N // F * gate_batch)[:, None] + channel_C[None, :]
    pooled_NC, _ = pool(value_from_NC, gate_from_NC, end_N, value_stride, gate_stride, live_NC, RATIO)  # pyright: ignore[reportGeneralTypeIssues]
    to_NC = group_N[:, None] * C + channel_C[None, :]
    tl.store(out_ptr + to_NC, pooled_NC, mask=(group_N < N)[:, None] & (channel_C < C)[None, :])


@triton.jit(do_not_specialize=["F", "N", "S"])
def backward(
    grad_ptr, value_ptr, gate_ptr, end_ptr, value_grad_ptr, gate_grad_ptr,
    value_batch, value_stride, gate_batch, gate_stride, F, N, S,
    C: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both gradients at the tokens of these groups, which are in no other group; the softmax is computed again."""
    group_N = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end_N = tl.load(end_ptr + group_N, mask=group_N < N, other=-1)
    live_NC = (end_N >= 0)[:, None] & (channel_C < C)[None, :]
    value_from_NC = value_ptr + (group_N // F * value_batch)[:, None] + channel_C[None, :]
    gate_from_NC = gate_ptr + (group_N // F * gate_batch)[:, None] + channel_C[None, :]
    pooled_NC, normalizer_NC = pool(value_from_NC, gate_from_NC, end_N, value_stride, gate_stride, live_NC, RATIO)  # pyright: ignore[reportGeneralTypeIssues]
    grad_NC = tl.load(grad_ptr + group_N[:, None] * C + channel_C[None, :], mask=live_NC, other=0.0).to(tl.float32)
    for back in tl.range(0, RATIO, loop_unroll_factor=2):
        token_N = tl.maximum(end_N - back, 0)
        to_NC = (group_N // F * S + token_N)[:, None] * C + channel_C[None, :]
        if RATIO == 1:
            tl.store(value_grad_ptr + to_NC, grad_NC, mask=live_NC)
        else:
            gate_NC = member(gate_from_NC, token_N, gate_stride, live_NC)
            value_NC = member(value_from_NC, token_N, value_stride, live_NC)
            share_NC = tl.exp(gate_NC - normalizer_NC) * grad_NC
            tl.store(value_grad_ptr + to_NC, share_NC, mask=live_NC)
            tl.store(gate_grad_ptr + to_NC, share_NC * (value_NC - pooled_NC), mask=live_NC)
