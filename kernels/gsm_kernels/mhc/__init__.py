"""Manifold-constrained hyper-connections between two sites (attention or feed-forward layers) of a residual network.

There are X residual streams instead of one. From the streams X_j that entered a site, three sets of coefficients are
computed per token: C writes the site's output y to the streams, M mixes the streams, and A reads the next site's input.

    X'_k = C_k y + sum_j M_jk X_j
    u'   = sum_k A_k X'_k                    the next site's input, before its norm

with

    r = phi . vec(X) / sqrt(mean(vec(X)^2) + eps)                             2X + X*X numbers
    A = sigmoid(scale_0 r[:X]   + bias[:X]) + hc_eps                          X values
    C = 2 sigmoid(scale_1 r[X:2X] + bias[X:2X])                               X values
    M = Sinkhorn(scale_2 r[2X:] + bias[2X:])                                  X x X, source then destination

    Sinkhorn: softmax over destinations, + hc_eps; then columns (sums over sources) divided by their sum + hc_eps; then
    rounds - 1 times rows, columns.

mhc_boundary(streams_BRXD, update_BRD, phi, bias, scale, rounds=20, eps=1e-6, hc_eps=1e-6)
    -> (streams_BRXD, mixed_BRD)

Args:
    streams_BRXD: the streams X that entered the site.
    update_BRD: the output y of the site.
    phi, bias, scale: parameters of shapes [2X+X*X, X*D], [2X+X*X] and [3].
    rounds: iterations of Sinkhorn's normalisation.
    eps, hc_eps: the small constants in the equations above.

Returns:
    The streams X' and the next site's input u', both in the dtype of the streams. Coefficients are computed in float32,
    or in float64 for float64 inputs. All tensors are differentiable.

Raises:
    ValueError: if the shapes do not fit, or rounds < 1.

Source: Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections"; A is computed from the streams before the site
as in DeepSeek-V4.1.
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
