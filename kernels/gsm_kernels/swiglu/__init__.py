"""The product inside a SwiGLU feed-forward, with clamped branches.

    y = silu(min(gate, limit)) * clip(up, -limit, limit)

Args:
    gate, up: [..., D].
    limit: the gate is clamped from above, the other branch on both sides.

Returns:
    y in the dtype of gate; computed in float32 or wider. Differentiable in gate and up; a clamped value gets no
    gradient.

Raises:
    ValueError: if the two shapes differ, or the limit is not positive.

Source: Shazeer 2020, "GLU Variants Improve Transformer"; the clamp is DeepSeek-V4.1's.
"""

from torch import Tensor

from .. import launch
from ..dispatch import Impl, Op
from . import reference, triton


def check(gate: Tensor, up: Tensor, limit: float) -> None:
    """Raise ValueError, in one sentence, if gate and up differ in shape, or the limit is not positive."""
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} must have one shape")
    if not limit > 0:
        raise ValueError(f"swiglu: limit = {limit} must be positive")


swiglu = Op(
    "swiglu",
    reference.swiglu,
    (Impl("triton", triton.swiglu, triton.refuses, launch.missing),),
    check=check,
    doc=__doc__,
)
