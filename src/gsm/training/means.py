"""Means over batches, and the weights of batches that are accumulated to a step."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class WeightedMean(Metric):
    """sum(weight x value) / sum(weight), over updates and over ranks.

    ``torchmetrics.MeanMetric`` looks for NaN by default, which makes a GPU wait at every update. With
    ``nan_strategy="disable"`` (version 1.9) it ignores the weights.
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
        """Add a scalar that counts ``weight`` times; weight 0 adds nothing."""
        self.total += torch.where(torch.as_tensor(weight, device=value.device) > 0, value * weight, 0)
        self.weight += weight

    def compute(self) -> Tensor:
        """Return the mean so far; NaN if nothing has counted."""
        return self.total / self.weight


class Means:
    """Weighted means by name; computing them begins new ones."""

    def __init__(self) -> None:
        self._means: dict[str, WeightedMean] = {}

    def update(self, name: str, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add a scalar to the mean of that name."""
        if name not in self._means:
            self._means[name] = WeightedMean().to(value.device)
        self._means[name].update(value.detach(), weight)

    def compute(self) -> dict[str, Tensor]:
        """Return the means of all values since the last call, over all ranks."""
        means = {name: mean.compute() for name, mean in self._means.items() if mean.update_called}
        for mean in self._means.values():
            mean.reset()
        return means


class OverBatches:
    """Make gradients of accumulated batches equal those of one large batch.

    The count of a step (of its targets, or rows) is known only after its last batch. So each loss is scaled by its
    count over the first batch's, and the gradients are corrected once, before the step. If all batches have equal
    counts, both factors are exactly 1.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None  # number in the step's batches so far
        self._unit: Tensor | None = None  # number in its first batch that has any

    def weigh(self, loss: Tensor, count: Tensor) -> Tensor:
        """Scale a batch's mean loss by its ``count`` over the first batch's count."""
        count = count.to(torch.promote_types(loss.dtype, torch.float32))
        if self._total is None or self._unit is None:
            self._total = self._unit = count
        else:  # earlier batches that count nothing weigh nothing, in any unit
            self._total, self._unit = self._total + count, torch.where(self._unit > 0, self._unit, count)
        return loss * (count / self._unit.clamp(min=1))

    def correction(self, divisor: int) -> Tensor | None:
        """Return the factor that corrects the summed gradients, and begin a new step; None if no loss was weighed.

        Args:
            divisor: by which every loss was divided, as if all batches had equal counts.
        """
        if self._total is None or self._unit is None:
            return None
        factor = divisor * self._unit.clamp(min=1) / self._total.clamp(min=1)
        self._total = self._unit = None
        return factor
