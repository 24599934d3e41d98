"""Cross-entropy of a linear head, without ever holding all logits.

    loss = mean over n, target_n != ignore_index, of  log sum_v exp(hidden_n . weight_v) - hidden_n . weight_target

Args:
    hidden_ND: differentiable.
    weight_VD: differentiable.
    target_N: int64, a row of the weight, or ignore_index.
    ignore_index: the target that marks rows without a loss.

Returns:
    A scalar in float32 or wider; 0 with gradient 0 if every target is ignored. Logits are computed in float32 or wider,
    a chunk of rows at a time, and so are the gradients, together with the loss; memory does not grow with N * V.

Raises:
    ValueError: if the shapes do not fit.
"""

from torch import Tensor

from ..dispatch import Impl, Op
from ..launch import missing
from ..shapes import agree
from . import reference, triton


def check(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int = -100) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes."""
    agree("linear_cross_entropy", hidden_ND=hidden_ND, weight_VD=weight_VD, target_N=target_N)


linear_cross_entropy = Op(
    "linear_cross_entropy",
    reference.linear_cross_entropy,
    (Impl("triton", triton.linear_cross_entropy, triton.refuses, missing),),
    check=check,
    doc=__doc__,
)
