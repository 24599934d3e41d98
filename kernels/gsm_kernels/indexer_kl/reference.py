"""Plain PyTorch indexer loss, in chunks of rows. The gradients are computed with the loss and scaled in backward.

Letters: G compared slots (F with `dense`, else K); the others are those of `gsm_kernels.joint`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attend.reference import near
from ..device import scratch_elements
from ..indexer import Indexer, fire
from ..inputs import learns
from ..joint import Cut, Far, as_bias, chunks, cut, pad_rows, probabilities, window_visible
from ..slots import gather_slots, slots_visible
from ..with_gradients import with_gradients
from .inputs import IndexerLoss, Inputs


def indexer_kl(inputs: Inputs) -> IndexerLoss:
    """See `gsm_kernels.indexer_kl`."""
    sums = _Sums(inputs.indexer, learns(*inputs.indexer))
    with torch.no_grad():
        for rows in _row_chunks(inputs):
            _add_chunk(sums, inputs, rows)
        count = (inputs.position_BR >= 0).sum().clamp(min=1)
        grads = [grad.div_(count) for grad in sums.grads]
        recall = sums.held / sums.seen if inputs.dense else torch.full_like(sums.held, torch.nan)
        loss = sums.loss / count
    return IndexerLoss(with_gradients(loss, inputs.indexer, grads), recall)


class _Sums:
    """Sums over chunks.

    Attributes:
        loss: sum of KL divergences.
        held: the teacher's mass on selected slots.
        seen: number of rows that see a slot.
        grads: gradients of the indexer's three inputs; empty if not wanted.
    """

    def __init__(self, indexer: Indexer, wants_grad: bool) -> None:
        wide, device = torch.promote_types(indexer.query_BRJI.dtype, torch.float32), indexer.query_BRJI.device
        self.loss, self.held, self.seen = torch.zeros(3, dtype=wide, device=device).unbind()
        self.grads = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in indexer if wants_grad)


def _row_chunks(inputs: Inputs) -> list[slice]:
    batch, rows, heads, channels = inputs.query_BRHC.shape
    _, _, index_heads, index_width = inputs.index_query_BRJI.shape
    whole = cut(rows, inputs.window_BEC.shape[1], inputs.width)
    other = batch * inputs.compared * (index_heads if inputs.dense else max(index_heads, channels, index_width))
    return chunks(whole, batch * heads, inputs.compared, other, scratch_elements(inputs.query_BRHC.device))


def _add_chunk(sums: _Sums, inputs: Inputs, rows: slice) -> None:
    visible = _compared(inputs, rows)
    visible &= (inputs.position_BR[:, rows] >= 0)[..., None]
    mass_BRG = _teacher_mass(inputs, rows, visible)
    total = mass_BRG.sum(-1, keepdim=True)
    target_BRG = mass_BRG / total.clamp(min=torch.finfo(mass_BRG.dtype).tiny)
    # The mass is 0 if a row sees no slot, or if all of it underflowed. Loss and gradient are then 0.
    sees_BR = total[..., 0] > 0
    sums.loss += _divergence(sums, inputs, rows, target_BRG, visible, sees_BR)
    if inputs.dense:
        # -1 reads an additional column of zeros.
        place_BRK = inputs.index_BRK[:, rows].remainder(target_BRG.shape[2] + 1)
        sums.held += F.pad(target_BRG, (0, 1)).gather(2, place_BRK).sum()
        sums.seen += visible.any(-1).sum()


def _compared(inputs: Inputs, rows: slice) -> Tensor:
    """Return which slots of the bank or of the selection are compared, bool [B,R,G]."""
    if not inputs.dense:
        return inputs.index_BRK[:, rows] >= 0
    pool = None if inputs.pool_BRN is None else inputs.pool_BRN[:, rows]
    return slots_visible(inputs.compared, inputs.first_BR[:, rows], inputs.last_BR[:, rows], pool, inputs.block)


def _teacher_mass(inputs: Inputs, rows: slice, visible: Tensor) -> Tensor:
    """Return the attention probability of each compared slot, summed over heads, [B,R,G]."""
    blocks, query_BRHC, window = near(inputs.attention, rows)
    far = _far(inputs, rows, visible, blocks, query_BRHC.dtype)
    seen = window_visible(inputs.position_BR[:, rows], blocks)
    softmax = probabilities(query_BRHC, window, seen, inputs.sink_H.to(query_BRHC.dtype), far)
    by_head = softmax.view(*query_BRHC.shape[:3], -1)[:, : rows.stop - rows.start, :, blocks.span : -1]
    return by_head.sum(2)


def _far(inputs: Inputs, rows: slice, visible: Tensor, blocks: Cut, dtype: torch.dtype) -> Far:
    bank_BFC, bias = inputs.bank_BFC.to(dtype), pad_rows(as_bias(visible, dtype), blocks)
    if inputs.dense:
        return Far(bank_BFC, bias)
    return Far(gather_slots(bank_BFC, pad_rows(inputs.index_BRK[:, rows], blocks, -1)), bias)


def _divergence(
    sums: _Sums, inputs: Inputs, rows: slice, target_BRG: Tensor, visible: Tensor, sees_BR: Tensor
) -> Tensor:
    """Return KL(target || softmax of the scores), summed over rows. Add the gradients to the sums if wanted."""
    fired = fire(inputs.indexer, rows, None if inputs.dense else inputs.index_BRK)
    score = fired.score()
    lowest, tiny = torch.finfo(score.dtype).min, torch.finfo(score.dtype).tiny
    score.masked_fill_(~visible, lowest)
    log_model = torch.log_softmax(score, -1)
    loss = (target_BRG * (target_BRG.clamp(min=tiny).log_() - log_model)).sum()
    if sums.grads:
        score_grad = torch.softmax(score, -1).mul_(sees_BR[..., None]).sub_(target_BRG)
        fired.add_gradients(sums.grads, score_grad)
    return loss
