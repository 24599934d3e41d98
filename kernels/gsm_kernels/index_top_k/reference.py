"""Plain PyTorch index scores and exact selection, in chunks of rows. Letters: N blocks in a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import scratch_elements
from ..indexer import fire
from ..rows import slices
from ..slots import slots_visible
from .inputs import Inputs


@torch.no_grad()
def index_top_k(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.index_top_k`."""
    first_BR, last_BR, pool_BRN = inputs.first_BR, inputs.last_BR, inputs.pool_BRN
    chosen = [torch.empty_like(first_BR[:, :0, None].expand(-1, -1, inputs.k))]
    for rows in row_slices(inputs):
        pool = None if pool_BRN is None else pool_BRN[:, rows]
        seen = slots_visible(inputs.key_BFI.shape[1], first_BR[:, rows], last_BR[:, rows], pool, inputs.block)
        score = fire(inputs.indexer, rows).score()
        chosen.append(highest(score.masked_fill_(~seen | score.isnan(), -torch.inf), inputs.k))
    return torch.cat(chosen, 1)


@torch.no_grad()
def candidate_pool(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.index_top_k`."""
    first_BR, last_BR = inputs.first_BR, inputs.last_BR
    pools = [torch.empty_like(first_BR[:, :0, None].expand(-1, -1, inputs.k))]
    for rows in row_slices(inputs):
        score = fire(inputs.indexer, rows).score()
        score.masked_fill_(score.isnan(), -torch.inf)
        pools.append(highest(_block_scores(score, first_BR[:, rows], last_BR[:, rows], inputs.block), inputs.k))
    return torch.cat(pools, 1)


def row_slices(inputs: Inputs) -> list[slice]:
    """Return ranges of rows whose products with all index heads fit the scratch memory."""
    batch, rows, heads, _ = inputs.query_BRJI.shape
    per_row = batch * heads * inputs.key_BFI.shape[1]
    return slices(rows, max(1, scratch_elements(inputs.query_BRJI.device) // max(1, per_row)))


def highest(score: Tensor, k: int) -> Tensor:
    """Return the places of the k highest scores in the last dimension, ascending, then -1.

    Scores of -inf are never chosen; of equal scores, the lowest places are.
    """
    places, lowest = score.shape[-1], torch.finfo(score.dtype).min
    index = torch.full((*score.shape[:-1], k + 1), -1, device=score.device)
    if k < places:
        # torch.topk breaks ties arbitrarily, so take only the k-th value from it, and choose among equal scores here.
        threshold = score.topk(k, -1, sorted=False).values.amin(-1, keepdim=True).clamp_(min=lowest)
        chosen, equal = score > threshold, score == threshold
        chosen |= equal & (equal.cumsum(-1, dtype=torch.int32) <= k - chosen.sum(-1, keepdim=True))
    else:
        chosen = score >= lowest
    # The n-th chosen place goes to column n. All others go to column 0, which is dropped.
    column = chosen.cumsum(-1).mul_(chosen)
    index.scatter_(-1, column, torch.arange(places, device=score.device).expand_as(column))
    return index[..., 1:]


def _block_scores(score_BRF: Tensor, first_BR: Tensor, last_BR: Tensor, block: int) -> Tensor:
    """Return the highest visible score of each block, [B,R,blocks]; +inf for the newest, -inf if none is visible."""
    batch, rows, slots = score_BRF.shape
    count = -(-slots // block)
    slot = first_BR[..., None] + torch.arange(count * block, device=score_BRF.device)
    inside = slot < last_BR[..., None]
    if slots == 0:
        return score_BRF
    shifted = score_BRF.gather(2, slot.clamp(max=slots - 1)).masked_fill(~inside, -torch.inf)
    best = shifted.view(batch, rows, count, block).amax(-1)
    newest = (last_BR - 1 - first_BR).div(block, rounding_mode="floor")
    is_newest = torch.arange(count, device=score_BRF.device) == newest[..., None]
    return best.masked_fill(is_newest & (last_BR > first_BR)[..., None], torch.inf)
