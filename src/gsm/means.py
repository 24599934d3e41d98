"""Means of what is measured batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class WeightedMean(Metric):
    """sum(weight x value) / sum(weight), over updates and over ranks.

    ``torchmetrics.MeanMetric`` either looks for NaN, which makes a GPU wait at every update, or, told not to
    (``nan_strategy="disable"``, version 1.9), forgets the weights.
    """

    full_state_update = False
    is_differentiable = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Adds a scalar that counts ``weight`` times; weight 0 adds nothing."""
        self.total += torch.where(torch.as_tensor(weight, device=value.device) > 0, value * weight, 0)
        self.weight += weight

    def compute(self) -> Tensor:
        """The mean so far; NaN if nothing has counted."""
        return self.total / self.weight
