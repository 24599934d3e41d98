"""The query input of an aggregation stage: the slot ``model/stage_query`` (paper, section 3.1, equation 7)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class StageQuery(ABC):
    """Base of all variants. The query input has the model's width, unless ``width`` is overridden."""

    def width(self, dim: int, stage: int) -> int:
        """Return the width of the input of stage number ``stage``, from 1, in a model of width ``dim``."""
        return dim

    @abstractmethod
    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """Return the input u_s, [B, R, U].

        Args:
            h_BRD: the stage's h (h_s).
            retrieved_BRD: sum of the increments of the previous stages (r_{s-1}); None in the first stage.
        """


class Accumulated(StageQuery):
    """The paper: h_s and the retrieval so far, [h_s ; r_{s-1}]; in the first stage h_1."""

    def width(self, dim: int, stage: int) -> int:
        """Return the model's width for the first stage, and twice that for the others."""
        return dim if stage == 1 else 2 * dim

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """Return [h_s ; r_{s-1}]."""
        return h_BRD if retrieved_BRD is None else torch.cat([h_BRD, retrieved_BRD], dim=-1)


class Current(StageQuery):
    """A control: h_s only, so that no stage knows the results of the previous stages."""

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """Return h_s."""
        return h_BRD


class Sum(StageQuery):
    """h_s + r_{s-1}: both with the same weights, in half the width."""

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """Return h_s + r_{s-1}."""
        return h_BRD if retrieved_BRD is None else h_BRD + retrieved_BRD
