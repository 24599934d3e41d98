"""RMSNorm over the last dimension.

    y = x / sqrt(mean(x^2) + eps) * weight

With angles the last channels of y are rotated, as by `gsm_kernels.rotate`.

Args:
    x: [..., D]; with angles [B,R,D] or [B,R,H,D].
    weight: [D].
    eps: added to the mean square.
    cos_BRP, sin_BRP: one angle for each of the last P pairs of channels (None: nothing is rotated). No gradient.

Returns:
    y in the dtype of x; computed in float32 or wider. Differentiable in x and weight.

Raises:
    ValueError: if the weight does not fit the last dimension, or the angles do not fit x.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from torch import Tensor

from .. import launch
from ..dispatch import Impl, Op
from ..rotate.inputs import check_angles
from . import reference, triton


def check(
    x: Tensor, weight: Tensor, eps: float = 1e-6, cos_BRP: Tensor | None = None, sin_BRP: Tensor | None = None
) -> None:
    """Raise ValueError, in one sentence, if the weight is not one number for each of the last dimension of x, or the
    angles do not fit x."""
    if weight.shape != x.shape[-1:]:
        shapes = f"weight of shape {tuple(weight.shape)} does not fit the last of {tuple(x.shape)}"
        raise ValueError(f"rms_norm: {shapes}")
    if cos_BRP is not None and sin_BRP is not None:
        check_angles("rms_norm", x, cos_BRP, sin_BRP)
    elif cos_BRP is not sin_BRP:
        raise ValueError("rms_norm: cos and sin must both be given, or neither")


rms_norm = Op(
    "rms_norm",
    reference.rms_norm,
    (Impl("triton", triton.rms_norm, triton.refuses, launch.missing),),
    check=check,
    doc=__doc__,
)
