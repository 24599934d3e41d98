"""What an aggregation stage asks with: the slot ``model/stage_query`` (paper, section 3.1, equation 7)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class StageQuery(ABC):
    """Base of all variants: a stage asks with what is as wide as the model, or as ``width`` says."""

    def width(self, dim: int, stage: int) -> int:
        """Width of the input of stage number ``stage``, from 1, in a model of width ``dim``."""
        return dim

    @abstractmethod
    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """The input u_s, [B, R, U].

        Args:
            h_BRD: what the attention of the stage's layer read from the streams (h_s).
            retrieved_BRD: what the stages before have retrieved (r_{s-1}); None in the first stage.
        """


class Accumulated(StageQuery):
    """The paper: h_s beside what has been retrieved so far, [h_s ; r_{s-1}]; in the first stage h_1."""

    def width(self, dim: int, stage: int) -> int:
        """Twice the model's, but for the first stage."""
        return dim if stage == 1 else 2 * dim

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """[h_s ; r_{s-1}]"""
        return h_BRD if retrieved_BRD is None else torch.cat([h_BRD, retrieved_BRD], dim=-1)


class Current(StageQuery):
    """A control: h_s alone, so that no stage knows what those before it have found."""

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """h_s"""
        return h_BRD


class Sum(StageQuery):
    """h_s + r_{s-1}: the same two under one set of weights, in half the width."""

    def __call__(self, h_BRD: Tensor, retrieved_BRD: Tensor | None) -> Tensor:
        """h_s + r_{s-1}"""
        return h_BRD if retrieved_BRD is None else h_BRD + retrieved_BRD
