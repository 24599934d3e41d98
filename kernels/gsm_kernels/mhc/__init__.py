"""Manifold-constrained hyper-connections: X residual streams, read by one mixture and written through another.

Between two sites, per token, in the single-pass form: the streams X that entered a site decide how its output y is
written, how they are mixed on the way past it, and how the next site reads the result:

    X'_k = C_k y + sum_j M_jk X_j
    u'   = sum_k A_k X'_k                    the next site's input, before its norm

where, from the streams that entered the site,

    r = phi . vec(X) / sqrt(mean(vec(X)^2) + eps)                             2X + X*X numbers
    A = sigmoid(scale_0 r[:X]   + bias[:X]) + hc_eps                          X values
    C = 2 sigmoid(scale_1 r[X:2X] + bias[X:2X])                               X values
    M = Sinkhorn(scale_2 r[2X:] + bias[2X:])                                  X x X, source then destination

    Sinkhorn: softmax over destinations, + hc_eps; then columns (sums over sources) divided by their sum + hc_eps; then
    rounds - 1 times rows, columns.

mhc_boundary(streams_BRXD, update_BRD, phi, bias, scale, rounds=20, eps=1e-6, hc_eps=1e-6)
    -> (streams_BRXD, mixed_BRD)
    phi [2X+X*X, X*D], bias [2X+X*X], scale [3]. Both results have the streams' dtype; coefficients are computed in
    float32 or wider. Everything is differentiable.

Raises:
    ValueError: if the shapes do not fit or rounds < 1.

Source: Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections"; the delayed read is DeepSeek-V4.1's.
"""

from .. import launch
from ..dispatch import Impl, Op
from . import reference, triton
from .inputs import Inputs, check

mhc_boundary = Op(
    "mhc_boundary",
    reference.mhc_boundary,
    (Impl("triton", triton.mhc_boundary, triton.refuses, launch.missing),),
    inputs=Inputs,
    check=check,
    doc=__doc__,
)
