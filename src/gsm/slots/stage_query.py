"""The query input u_s of an aggregation stage: the config group ``model/stage_query`` (paper, equation 7)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class StageQuery(ABC):
    """Base of all variants. u_s has the model's width D, unless ``width`` is overridden."""

    def width(self, dim: int, stage: int) -> int:
        """Return the width of u_s for the stage with number ``stage``, counted from 1, in a model of width ``dim``."""
        return dim

    @abstractmethod
    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """Return u_s, [B, R, U].

        Args:
            h_BRD: h_s.
            retrieved_BRD: r_{s-1}, the sum of the increments of the previous stages; None in the first stage.
        """


class Accumulated(StageQuery):
    """The paper: u_s = [h_s ; r_{s-1}], with u_1 = h_1."""

    def width(self, dim: int, stage: int) -> int:
        """Return D for the first stage, and 2 D for the others."""
        return dim if stage == 1 else 2 * dim

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """Return [h_s ; r_{s-1}]."""
        return h_BRD if retrieved_BRD is None else torch.cat([h_BRD, retrieved_BRD], dim=-1)


class Current(StageQuery):
    """A control: u_s = h_s, so that a stage does not see the results of the previous stages."""

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """Return h_s."""
        return h_BRD


class Sum(StageQuery):
    """u_s = h_s + r_{s-1}, in half the width of ``Accumulated``."""

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """Return h_s + r_{s-1}."""
        return h_BRD if retrieved_BRD is None else h_BRD + retrieved_BRD
