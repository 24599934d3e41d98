"""A linear map of its own for each group of rows, as the experts of a mixture need it.

Rows lie sorted by group: the rows of group e are [end_{e-1}, end_e). Then

    y_m = weight_e x_m    for every row m of group e

Args:
    x_MD: the rows.
    weight_END: one matrix for each group; E groups, D numbers in, N numbers out.
    end_E: int32, one past the last row of each group, ascending; the last is M. A group may be empty.

Returns:
    y_MN in the dtype of x, which the weights share. Differentiable in x and weight; an empty group gets gradients of 0.

Raises:
    ValueError: if the shapes do not fit.

Source: the grouped matrix products of dropless mixtures of experts (Gale et al. 2023, MegaBlocks).
"""

from torch import Tensor

from ..dispatch import Impl, Op
from ..shapes import agree
from . import grouped_mm, reference


def check(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes."""
    agree("grouped_linear", x_MD=x_MD, weight_END=weight_END, end_E=end_E)


grouped_linear = Op(
    "grouped_linear",
    reference.grouped_linear,
    (Impl("grouped_mm", grouped_mm.grouped_linear, grouped_mm.refuses, grouped_mm.missing),),
    check=check,
    doc=__doc__,
)
