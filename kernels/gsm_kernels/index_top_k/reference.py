"""Plain PyTorch index scores and exact selection, in chunks of rows. Letters: N blocks of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32, scratch_elements
from ..slots import visible


@torch.no_grad()
def index_top_k(
    query_BRJI: Tensor,
    weight_BRJ: Tensor,
    key_BFI: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    k: int,
    pool_BRN: Tensor | None = None,
    block: int = 8,
) -> Tensor:
    """See `gsm_kernels.index_top_k`."""
    chosen = [torch.empty_like(first_BR[:, :0, None].expand(-1, -1, k))]
    for rows in row_slices(query_BRJI, key_BFI):
        pool = None if pool_BRN is None else pool_BRN[:, rows]
        seen = slots_visible(key_BFI.shape[1], first_BR[:, rows], last_BR[:, rows], pool, block)
        score = index_scores(query_BRJI[:, rows], weight_BRJ[:, rows], key_BFI)
        chosen.append(highest(score.masked_fill_(~seen, -torch.inf), k))
    return torch.cat(chosen, 1)


@torch.no_grad()
def candidate_pool(
    query_BRJI: Tensor,
    weight_BRJ: Tensor,
    key_BFI: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    blocks: int,
    block: int = 8,
) -> Tensor:
    """See `gsm_kernels.index_top_k`."""
    pools = [torch.empty_like(first_BR[:, :0, None].expand(-1, -1, blocks))]
    for rows in row_slices(query_BRJI, key_BFI):
        score = index_scores(query_BRJI[:, rows], weight_BRJ[:, rows], key_BFI)
        pools.append(highest(_block_scores(score, first_BR[:, rows], last_BR[:, rows], block), blocks))
    return torch.cat(pools, 1)


def row_slices(query_BRJI: Tensor, key_BFI: Tensor) -> list[slice]:
    """Ranges of rows whose scores of all index heads fit the scratch memory."""
    batch, rows, heads, _ = query_BRJI.shape
    step = max(1, scratch_elements(query_BRJI.device) // max(1, batch * heads * key_BFI.shape[1]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def index_scores(query_BRJI: Tensor, weight_BRJ: Tensor, key_BFI: Tensor) -> Tensor:
    """sum_j weight relu(query . key) for every slot, [B,R,F], in float32 or wider."""
    query, weight = at_least_float32(query_BRJI), at_least_float32(weight_BRJ)
    batch, rows, heads, width = query.shape
    fired = torch.bmm(query.reshape(batch, rows * heads, width), at_least_float32(key_BFI).mT).relu_()
    return weigh(fired.view(batch, rows, heads, -1), weight)


def weigh(fired_BRJF: Tensor, weight_BRJ: Tensor) -> Tensor:
    """sum_j weight_j fired_j, head by head: there are few, and the BLAS is slow at products of so few numbers."""
    weight_BRJ1 = weight_BRJ[..., None]
    score_BRF = fired_BRJF[:, :, 0] * weight_BRJ1[:, :, 0]
    for head in range(1, fired_BRJF.shape[2]):
        score_BRF.addcmul_(fired_BRJF[:, :, head], weight_BRJ1[:, :, head])
    return score_BRF


def slots_visible(slots: int, first_BR: Tensor, last_BR: Tensor, pool_BRN: Tensor | None, block: int) -> Tensor:
    """Which slots a row may choose, bool [B,R,F]: those in [first, last), and in its pool if it has one."""
    seen = visible(first_BR, last_BR, slice(0, slots))
    if pool_BRN is None:
        return seen
    ordinals = slots // block + 1
    member = torch.zeros(*first_BR.shape, ordinals + 1, dtype=torch.bool, device=first_BR.device)
    member.scatter_(2, torch.where(pool_BRN < 0, ordinals, pool_BRN.clamp(max=ordinals)), True)
    slot_F = torch.arange(slots, device=first_BR.device)
    ordinal = (slot_F - first_BR[..., None]).div(block, rounding_mode="floor").clamp_(0, ordinals - 1)
    return seen & member.gather(2, ordinal)


def highest(score: Tensor, k: int) -> Tensor:
    """Places of the k highest scores above -inf in the last dimension, ascending, ties to the lowest, -1 at the end."""
    places, lowest = score.shape[-1], torch.finfo(score.dtype).min
    index = torch.full((*score.shape[:-1], k + 1), -1, device=score.device)
    if k < places:
        # torch.topk is exact in its values but breaks ties as it likes: keep its threshold, choose among equals here.
        threshold = score.topk(k, -1, sorted=False).values.amin(-1, keepdim=True).clamp_(min=lowest)
        chosen, equal = score > threshold, score == threshold
        chosen |= equal & (equal.cumsum(-1, dtype=torch.int32) <= k - chosen.sum(-1, keepdim=True))
    else:
        chosen = score >= lowest
    # The n-th chosen place goes to column n, everything else to column 0, which is dropped.
    column = chosen.cumsum(-1).mul_(chosen)
    index.scatter_(-1, column, torch.arange(places, device=score.device).expand_as(column))
    return index[..., 1:]


def _block_scores(score_BRF: Tensor, first_BR: Tensor, last_BR: Tensor, block: int) -> Tensor:
    """The highest visible score of each block, [B,R,blocks]; +inf for the newest, -inf where nothing is visible."""
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
