"""The elementwise product of a SwiGLU feed-forward layer, with clamped inputs.

    y = silu(min(gate, limit)) * clip(up, -limit, limit)

Args:
    gate, up: [..., D]. Differentiable; a clamped element has gradient 0.
    limit: upper bound of gate, and bound of the absolute value of up.

Returns:
    y in the dtype of gate; computed in float32, or in float64 for float64 inputs.

Raises:
    ValueError: if gate and up differ in shape, or the limit is not positive.

Source: Shazeer 2020, "GLU Variants Improve Transformer"; the clamp of DeepSeek-V4.1.
"""

from torch import Tensor

from .. import launch
from ..dispatch import Impl, Op
from . import reference, triton


def check(gate: Tensor, up: Tensor, limit: float) -> None:
    """Raise ValueError if gate and up differ in shape, or the limit is not positive."""
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate and up must have the same shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    if not limit > 0:
        raise ValueError(f"swiglu: limit must be positive, got {limit}")


swiglu = Op(
    "swiglu",
    reference.swiglu,
    (Impl("triton", triton.swiglu, triton.refuses, launch.missing),),
    check=check,
    doc=__doc__,
)
