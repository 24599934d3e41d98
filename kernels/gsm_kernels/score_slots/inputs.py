"""The arguments of `score_slots`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..indexer import Indexer
from ..shapes import agree


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.score_slots`, described there."""

    query_BRJI: Tensor
    weight_BRJ: Tensor
    key_BFI: Tensor
    index_BRK: Tensor

    @property
    def indexer(self) -> Indexer:
        """The inputs of the scores; they get a gradient."""
        return Indexer(*self[:3])


def check(inputs: Inputs) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes."""
    agree("score_slots", inputs)
