"""Linear attention (Katharopoulos et al., 2020): a product of features replaces the exponential of softmax attention,
so that the past is one sum."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence


class LinearAttention(Recurrence):
    """``S_t = S_(t-1) + phi(k_t) v_t^T``, ``out_t = norm(S_t^T phi(q_t))``, ``phi(x) = elu(x) + 1``.

    The original divides the output of a head by the sum of its weights. This is one positive number, and the norm of
    each head removes any such factor (apart from its epsilon), so it is not computed. Qin et al. (2022), "The Devil in
    Linear Transformer", also replace it by a norm, because it makes training unstable.

    Args:
        shape: shared widths.
        geometry: unused.
        name: prefix of its taps.
        convolution: tokens that the short convolution sees; 1: no convolution, as in the original.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, convolution: int):
        super().__init__(shape, name=name, convolution=convolution)

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """Apply phi."""
        return F.elu(x_BTHC) + 1
