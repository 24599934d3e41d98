"""The clamped SwiGLU product and its gradients, element by element."""

from __future__ import annotations

import numpy as np

from ..arrays import exp, floats
from ..native import compiled

ONE = np.float32(1)


@compiled
def forward(first, last, limit, gate_at, up_at, out_at):
    """Compute silu(min(gate, limit)) * clip(up, -limit, limit) of elements first to last."""
    gate, up, out = floats(gate_at, (last,)), floats(up_at, (last,)), floats(out_at, (last,))
    limit = np.float32(limit)
    for i in range(first, last):
        g, u = gate[i], up[i]
        capped = limit if g > limit else g  # so that NaN stays NaN
        clipped = limit if u > limit else (-limit if u < -limit else u)
        out[i] = capped / (ONE + exp(-capped)) * clipped


@compiled
def backward(first, last, limit, grad_at, gate_at, up_at, gate_grad_at, up_grad_at):
    """Compute both gradients of elements first to last, 0 for a clamped element."""
    grad, gate, up = floats(grad_at, (last,)), floats(gate_at, (last,)), floats(up_at, (last,))
    gate_grad, up_grad = floats(gate_grad_at, (last,)), floats(up_grad_at, (last,))
    limit = np.float32(limit)
    for i in range(first, last):
        d, g, u = grad[i], gate[i], up[i]
        capped = limit if g > limit else g
        clipped = limit if u > limit else (-limit if u < -limit else u)
        opening = ONE / (ONE + exp(-capped))
        to_gate, to_up = d * clipped * opening * (ONE + capped * (ONE - opening)), d * capped * opening
        gate_grad[i] = np.float32(0) if g > limit else to_gate
        up_grad[i] = np.float32(0) if abs(u) > limit else to_up
