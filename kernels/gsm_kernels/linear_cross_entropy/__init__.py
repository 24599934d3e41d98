"""Cross-entropy of a linear output layer, without storing all logits.

    loss = mean over n, target_n != ignore_index, of  log sum_v exp(hidden_n . weight_v) - hidden_n . weight_target

Logits are computed in float32 or float64, a chunk of rows at a time, and the gradients together with the loss. Memory
does not grow with N * V.

Letters: N rows (tokens), D width, V vocabulary.

Args:
    hidden_ND: hidden states; differentiable.
    weight_VD: weight of the output layer; differentiable.
    target_N: int64, a row of the weight, or ignore_index.
    ignore_index: the target of rows without a loss.

Returns:
    The mean loss, a scalar in float32, or in float64 for float64 inputs. If every target is ignored, loss and gradients
    are 0.

Raises:
    ValueError: if the shapes do not fit.
"""

from torch import Tensor

from ..dispatch import Impl, Op
from ..launch import missing
from ..shapes import agree
from . import reference, triton


def check(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int = -100) -> None:
    """Raise ValueError if a letter has two sizes."""
    agree("linear_cross_entropy", hidden_ND=hidden_ND, weight_VD=weight_VD, target_N=target_N)


linear_cross_entropy = Op(
    "linear_cross_entropy",
    reference.linear_cross_entropy,
    (Impl("triton", triton.linear_cross_entropy, triton.refuses, missing),),
    check=check,
    doc=__doc__,
)
