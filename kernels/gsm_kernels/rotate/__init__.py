"""Rotary position embedding: rotate adjacent pairs of the last channels, each pair by its angle.

The pair (a, b) at channels C-2P+2p and C-2P+2p+1 becomes (a cos - b sin, a sin + b cos). Channels before the last 2P
are unchanged.

Letters: B sequences, R rows, H heads, C channels, P rotated pairs.

Args:
    x: [B,R,C] or [B,R,H,C]; C is even. Differentiable.
    cos_BRP, sin_BRP: cosine and sine of the angle of each pair, P <= C/2. No gradient.
    inverse: rotate by the negative angles, which is the adjoint.

Returns:
    The rotated tensor in the dtype of x; computed in float32, or in float64 for float64 inputs.

Raises:
    ValueError: if the shapes do not fit.

Source: Su et al. 2021, "RoFormer", equation 15, in the interleaved layout.
"""

from .. import launch
from ..dispatch import Impl, Op
from . import reference, triton
from .inputs import check

rotate = Op(
    "rotate",
    reference.rotate,
    (Impl("triton", triton.rotate, triton.refuses, launch.missing),),
    check=check,
    doc=__doc__,
)
