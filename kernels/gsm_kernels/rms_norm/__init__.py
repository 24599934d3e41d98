"""RMSNorm over the last dimension.

    y = x / sqrt(mean(x^2) + eps) * weight

Args:
    x: [..., D].
    weight: [D].
    eps: added to the mean square.

Returns:
    y in the dtype of x; computed in float32 or wider. Differentiable in x and weight.

Raises:
    ValueError: if the weight does not fit the last dimension.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from torch import Tensor

from .. import launch
from ..dispatch import Impl, Op
from . import reference, triton


def check(x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Raise ValueError, in one sentence, if the weight is not one number for each of the last dimension of x."""
    if weight.shape != x.shape[-1:]:
        shapes = f"weight of shape {tuple(weight.shape)} does not fit the last of {tuple(x.shape)}"
        raise ValueError(f"rms_norm: {shapes}")


rms_norm = Op(
    "rms_norm",
    reference.rms_norm,
    (Impl("triton", triton.rms_norm, triton.refuses, launch.missing),),
    check=check,
    doc=__doc__,
)
