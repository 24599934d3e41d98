"""Manifold-constrained hyper-connections: X residual streams, read by one mixture and written through a near-permutation.

Around a site y = F(norm(u)), per token, in the single-pass form (a site reads with the mixture that the previous one left):

    mhc_enter    u    = sum_x read_x X_x
    mhc_leave    X'_k = C_k y + sum_j M_jk X_j          and the next site's read = A

where, from the streams that entered the site,

    r = phi . vec(X) / sqrt(mean(vec(X)^2) + eps)                             2X + X*X numbers
    A = sigmoid(scale_0 r[:X]   + bias[:X]) + hc_eps                          X values
    C = 2 sigmoid(scale_1 r[X:2X] + bias[X:2X])                               X values
    M = Sinkhorn(scale_2 r[2X:] + bias[2X:])                                  X x X, first index source, second destination

    Sinkhorn: softmax over destinations, + hc_eps; then columns (sums over sources) divided by their sum + hc_eps; then
    rounds - 1 times rows, columns.

mhc_enter(streams_BTXD, read_BTX) -> mixed_BTD, in the streams' dtype.
mhc_leave(streams_BRXD, update_BRD, phi, bias, scale, rounds=20, eps=1e-6, hc_eps=1e-6) -> (streams_BRXD, read_BRX):
    phi [2X+X*X, X*D], bias [2X+X*X], scale [3]. The streams keep their dtype; the read vector is float32 or wider, as every
    coefficient is. Everything is differentiable.

Raises:
    ValueError: if the shapes do not fit or rounds < 1.

Source: Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections"; the delayed read is DeepSeek-V4.1's.
"""

from torch import Tensor

from ..dispatch import Op
from ..shapes import agree, require
from . import reference


def check_enter(streams_BTXD: Tensor, read_BTX: Tensor) -> None:
    agree("mhc_enter", streams_BTXD=streams_BTXD, read_BTX=read_BTX)


def check_leave(
    streams_BRXD: Tensor,
    update_BRD: Tensor,
    phi: Tensor,
    bias: Tensor,
    scale: Tensor,
    rounds: int = 20,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> None:
    sizes = agree("mhc_leave", streams_BRXD=streams_BRXD, update_BRD=update_BRD)
    streams, width = sizes["X"], sizes["D"]
    numbers = 2 * streams + streams * streams
    shapes, wanted = [tuple(x.shape) for x in (phi, bias, scale)], [(numbers, streams * width), (numbers,), (3,)]
    require("mhc_leave", shapes == wanted, f"phi, bias, scale have shapes {shapes}; {streams} streams need {wanted}")
    require("mhc_leave", rounds >= 1, f"rounds = {rounds} must be at least 1")


mhc_enter = Op("mhc_enter", reference.mhc_enter, check=check_enter, doc=__doc__)
mhc_leave = Op("mhc_leave", reference.mhc_leave, check=check_leave, doc=__doc__)
