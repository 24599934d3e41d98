"""Linear attention (Katharopoulos et al., 2020): softmax attention with its exponential replaced by a product of
features, so that the past is one sum."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence


class LinearAttention(Recurrence):
    """``S_t = S_(t-1) + phi(k_t) v_t^T``, ``out_t = norm(S_t^T phi(q_t))``, ``phi(x) = elu(x) + 1``.

    The original divides the output of a head by the sum of its weights. That is one positive number, and the norm of
    each head takes any such factor out (but for its epsilon), so it is not computed; Qin et al. (2022), "The Devil in
    Linear Transformer", drop it for a norm because it makes training unstable.

    Args:
        shape: shared widths.
        geometry: not needed.
        name: what its taps are called.
        convolution: tokens that the short convolution sees; 1: there is none, as in the original.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, convolution: int):
        super().__init__(shape, name=name, convolution=convolution)

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """phi."""
        return F.elu(x_BTHC) + 1
