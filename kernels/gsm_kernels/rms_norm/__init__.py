"""RMSNorm over the last dimension, and optionally a rotation of the last channels.

    y = x / sqrt(mean(x^2) + eps) * weight

With angles, the last 2P channels of y are rotated as by `gsm_kernels.rotate`.

Args:
    x: [..., D]; with angles [B,R,D] or [B,R,H,D]. Differentiable.
    weight: [D]. Differentiable.
    eps: added to the mean square.
    cos_BRP, sin_BRP: cosine and sine of an angle for each of the last P pairs of channels; None: no rotation. No
        gradient.

Returns:
    y in the dtype of x; computed in float32, or in float64 for float64 inputs.

Raises:
    ValueError: if the weight does not have D elements, the angles do not fit x, or only one of cos and sin is given.

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
    """Check the inputs.

    Raises:
        ValueError: if the weight does not have D elements, the angles do not fit x, or only one of the two is given.
    """
    if weight.shape != x.shape[-1:]:
        shapes = f"weight must have the last dimension of x {tuple(x.shape)}, got shape {tuple(weight.shape)}"
        raise ValueError(f"rms_norm: {shapes}")
    if cos_BRP is not None and sin_BRP is not None:
        check_angles("rms_norm", x, cos_BRP, sin_BRP)
    elif cos_BRP is not sin_BRP:
        raise ValueError("rms_norm: cos and sin must be given together, got one of them")


rms_norm = Op(
    "rms_norm",
    reference.rms_norm,
    (Impl("triton", triton.rms_norm, triton.refuses, launch.missing),),
    check=check,
    doc=__doc__,
)
