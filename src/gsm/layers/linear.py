"""Bias-free linear maps with the project's initialisation: normal with variance 1 / fan-in."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gsm_kernels.device import in_dtype

# Gain of maps that write to the residual streams: a model that starts close to its embedding learns faster at first.
INTO_RESIDUAL = 0.2


def draw(weight: Tensor, std: float) -> None:
    """Fill a weight from a normal distribution, except on the meta device.

    There PyTorch would take milliseconds to fill nothing: a large model, built only to count its parameters, would take
    ten seconds instead of two.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Linear(nn.Linear):
    """``x W^T``, used for every projection of the models.

    Args:
        dim_in, dim_out: widths.
        gain: scale of the initial weights; inputs of unit variance give outputs of variance ``gain ** 2``.
    """

    def __init__(self, dim_in: int, dim_out: int, *, gain: float = 1.0):
        self.gain = gain
        super().__init__(dim_in, dim_out, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        draw(self.weight, self.gain * self.in_features**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., dim_in] to [..., dim_out], without the lookup of a bias, which would run seventy times per
        token."""
        return linear(input, self.weight)


class GroupedLinear(nn.Module):
    """Parallel small linear maps: group g of the input is multiplied by its own matrix.

    Args:
        groups: number of groups; must divide ``dim_in``.
        dim_in: width of the whole input.
        rank: outputs of each group.
    """

    def __init__(self, groups: int, dim_in: int, rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, rank, dim_in // groups))
        draw(self.weight, (dim_in // groups) ** -0.5)

    def forward(self, x_BRD: Tensor) -> Tensor:
        """Map [..., dim_in] to [..., groups * rank]."""
        groups, rank, width = self.weight.shape
        split = x_BRD.reshape(-1, groups, width).transpose(0, 1)
        mapped = torch.bmm(split, in_dtype(self.weight, split.dtype).mT)
        return mapped.transpose(0, 1).reshape(*x_BRD.shape[:-1], groups * rank)
