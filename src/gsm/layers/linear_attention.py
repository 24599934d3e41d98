"""Linear attention (Katharopoulos et al., 2020): a product of features replaces the exponential of softmax attention,
so that one matrix, a sum over tokens, stores the past."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence


class LinearAttention(Recurrence):
    """``S_t = S_(t-1) + phi(k_t) v_t^T``, ``out_t = norm(S_t^T phi(q_t))``, ``phi(x) = elu(x) + 1``.

    The original divides the output of a head by the sum of its weights. Here the norm of each head takes the place of
    this division, which would have no effect before the norm apart from its epsilon. Qin et al. (2022), "The Devil in
    Linear Transformer", also use a norm instead, because the division makes training unstable.

    Args:
        shape: widths that all attention layers share.
        geometry: unused.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        convolution: width in tokens of the short convolution; 1: no convolution, as in the original.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, convolution: int):
        super().__init__(shape, name=name, convolution=convolution)

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """Apply phi(x) = elu(x) + 1."""
        return F.elu(x_BTHC) + 1
