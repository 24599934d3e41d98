"""Triton kernels of the clamped SwiGLU product. N is the number of elements; arithmetic is in float32.

By default, `tl.minimum` on a GPU returns the other operand for NaN, so that NaN would become the limit. Here NaN is
propagated.
"""

import triton
import triton.language as tl


@triton.jit
def forward(gate_ptr, up_ptr, out_ptr, limit, N, BLOCK: tl.constexpr):
    """Compute out = silu(min(gate, limit)) * clip(up, -limit, limit)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    gate = tl.minimum(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32), limit, tl.PropagateNan.ALL)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    clipped = tl.minimum(tl.maximum(up, -limit, tl.PropagateNan.ALL), limit, tl.PropagateNan.ALL)
    tl.store(out_ptr + at, gate * tl.sigmoid(gate) * clipped, mask=inside)


@triton.jit
def backward(grad_ptr, gate_ptr, up_ptr, gate_grad_ptr, up_grad_ptr, limit, N, BLOCK: tl.constexpr):
    """Compute both gradients, 0 for a clamped element. The activation is computed again."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    capped = tl.minimum(gate, limit, tl.PropagateNan.ALL)
    clipped = tl.minimum(tl.maximum(up, -limit, tl.PropagateNan.ALL), limit, tl.PropagateNan.ALL)
    sigmoid = tl.sigmoid(capped)
    silu = capped * sigmoid
    gate_grad = tl.where(gate > limit, 0.0, grad * clipped * (sigmoid + silu * (1 - sigmoid)))
    up_grad = tl.where(tl.abs(up) > limit, 0.0, grad * silu)
    tl.store(gate_grad_ptr + at, gate_grad, mask=inside)
    tl.store(up_grad_ptr + at, up_grad, mask=inside)
