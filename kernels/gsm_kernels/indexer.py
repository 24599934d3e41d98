"""The index score of a slot, sum_j weight_j relu(query_j . key): its inputs, and its computation for the references.

Letters: J index heads, I their width, F slots, G slots that are scored. A head "fires" for a slot where its product
query_j . key is positive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .device import at_least_float32
from .launch import unfit
from .slots import flat_slots, gather_slots


class Indexer(NamedTuple):
    """The inputs of index scores: queries and head weights of the rows, and keys of the slots."""

    query_BRJI: Tensor
    weight_BRJ: Tensor
    key_BFI: Tensor

    def unfit(self) -> str | None:
        """Return why Triton kernels cannot take these tensors, or None; a tile holds all heads of a row."""
        heads, width = self.query_BRJI.shape[2:]
        if not 1 <= heads <= 64 or not 1 <= width <= 128:
            return f"made for 1 to 64 index heads of width 1 to 128, got {heads} of width {width}"
        return unfit(*self)

    def readable(self) -> Indexer:
        """Return contiguous tensors, with queries and keys in the wider of their two dtypes, as `tl.dot` needs them."""
        common = torch.promote_types(self.query_BRJI.dtype, self.key_BFI.dtype)
        return Indexer(
            *(x.contiguous() for x in (self.query_BRJI.to(common), self.weight_BRJ, self.key_BFI.to(common)))
        )


class Fired(NamedTuple):
    """The products relu(query_j . key) of a range of rows.

    Attributes:
        rows: the range of rows.
        index_BRK: the slots of each row; None: all slots.
        queries, keys: operands of the batched product: [B,R*J,I] and [B,F,I], or with an index [B*R,J,I] and [B*R,K,I].
        weight_BRJ: weights of the heads.
        fired_BRJG: relu(query . key).
    """

    rows: slice
    index_BRK: Tensor | None
    queries: Tensor
    keys: Tensor
    weight_BRJ: Tensor
    fired_BRJG: Tensor

    def score(self) -> Tensor:
        """Return sum_j weight_j fired_j, [B,R,G]. It sums head by head, because the BLAS is slow for so few heads."""
        weight_BRJ1 = self.weight_BRJ[..., None]
        score_BRG = self.fired_BRJG[:, :, 0] * weight_BRJ1[:, :, 0]
        for head in range(1, self.fired_BRJG.shape[2]):
            score_BRG.addcmul_(self.fired_BRJG[:, :, head], weight_BRJ1[:, :, head])
        return score_BRG

    def add_gradients(self, grads: tuple[Tensor, ...], score_grad_BRG: Tensor) -> None:
        """Write the gradients of these rows' queries and weights, and add to the gradient of the keys.

        Args:
            grads: the buffers [B,R,J,I], [B,R,J] and [B,F,I] of all rows and slots.
            score_grad_BRG: the gradient of the scores of these rows.

        It overwrites `fired_BRJG`.
        """
        query_grad, weight_grad, key_grad = grads
        score_grad, fired = score_grad_BRG[:, :, None], self.fired_BRJG
        weight_grad[:, self.rows] = (fired * score_grad).sum(-1)
        # The derivative of relu is 1 where the product is positive.
        fired_grad = fired.sign_().mul_(self.weight_BRJ[..., None]).mul_(score_grad)
        fired_grad = fired_grad.view(*self.queries.shape[:2], self.keys.shape[1])
        query_grad[:, self.rows] = torch.bmm(fired_grad, self.keys).view(*fired.shape[:3], self.keys.shape[2])
        added = torch.bmm(fired_grad.mT, self.queries)
        if self.index_BRK is None:
            key_grad += added
        elif key_grad.shape[1]:
            flat = flat_slots(self.index_BRK, key_grad.shape[1])
            key_grad.view(-1, key_grad.shape[2]).index_add_(0, flat, added.flatten(0, 1))


def fire(indexer: Indexer, rows: slice, index_BRK: Tensor | None = None) -> Fired:
    """Return the products of a range of rows with the slots of an index, or with all slots, in float32 or float64."""
    query, weight_BRJ = (at_least_float32(x[:, rows]) for x in indexer[:2])
    if index_BRK is None:
        keys = at_least_float32(indexer.key_BFI)
    else:
        index_BRK = index_BRK[:, rows]
        keys = at_least_float32(gather_slots(indexer.key_BFI, index_BRK))
    batch, length, heads, width = query.shape
    queries = query.reshape(len(keys), batch * length * heads // max(len(keys), 1), width)
    fired = torch.bmm(queries, keys.mT).relu_().view(batch, length, heads, keys.shape[1])
    return Fired(rows, index_BRK, queries, keys, weight_BRJ, fired)
