"""The index score of a slot, sum_j weight_j relu(query_j . key), and its three input tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .launch import unfit


class Indexer(NamedTuple):
    """Queries and weights of the rows, and keys of the slots."""

    query_BRJI: Tensor
    weight_BRJ: Tensor
    key_BFI: Tensor

    def unfit(self) -> str | None:
        """Return why these cannot go to kernels with all heads of a row in one tile, or None."""
        heads, width = self.query_BRJI.shape[2:]
        if not 1 <= heads <= 64 or not 1 <= width <= 128:
            return f"made for 1 to 64 index heads of width 1 to 128, got {heads} of width {width}"
        return unfit(*self)

    def readable(self) -> Indexer:
        """Return contiguous tensors, with queries and keys in the wider of their two dtypes, for matrix units."""
        common = torch.promote_types(self.query_BRJI.dtype, self.key_BFI.dtype)
        return Indexer(
            *(x.contiguous() for x in (self.query_BRJI.to(common), self.weight_BRJ, self.key_BFI.to(common)))
        )


def weigh(fired_BRJF: Tensor, weight_BRJ: Tensor) -> Tensor:
    """Return sum_j weight_j fired_j, computed head by head, because the BLAS is slow for so few heads."""
    weight_BRJ1 = weight_BRJ[..., None]
    score_BRF = fired_BRJF[:, :, 0] * weight_BRJ1[:, :, 0]
    for head in range(1, fired_BRJF.shape[2]):
        score_BRF.addcmul_(fired_BRJF[:, :, head], weight_BRJ1[:, :, head])
    return score_BRF
