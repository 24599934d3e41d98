"""Rotary positions: adjacent pairs of the last channels, each turned by an angle.

The pair (a, b) at channels C-2P+2p and C-2P+2p+1 becomes (a cos - b sin, a sin + b cos). Channels before the last 2P
pass through. `inverse` turns in the other direction and is the exact adjoint.

Letters: B batch, R rows, H heads, C channels, P angles: half as many as rotated channels.

Args:
    x: [B,R,C] or [B,R,H,C]; C even. Differentiable.
    cos_BRP, sin_BRP: one angle per pair, P <= C/2. No gradient.

Returns:
    the rotated tensor in the dtype of x; computed in float32 or wider.

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
