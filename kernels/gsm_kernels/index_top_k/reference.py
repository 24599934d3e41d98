"""Plain PyTorch index scores and exact selection, in chunks of rows. Letters: N blocks of a pool, B R J I F K as everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32, scratch_elements


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
        visible = slots_visible(key_BFI.shape[1], first_BR[:, rows], last_BR[:, rows], pool, block)
        score = index_scores(query_BRJI[:, rows], weight_BRJ[:, rows], key_BFI)
        chosen.append(highest(score.masked_fill_(~visible, -torch.inf), k))
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
    return (fired.view(batch, rows, heads, -1) * weight[..., None]).sum(2)


def slots_visible(slots: int, first_BR: Tensor, last_BR: Tensor, pool_BRN: Tensor | None, block: int) -> Tensor:
    """Which slots a row may choose, bool [B,R,F]: those in [first, last), and in its pool if it has one."""
    slot_F = torch.arange(slots, device=first_BR.device)
    visible = (slot_F >= first_BR[..., None]) & (slot_F < last_BR[..., None])
    if pool_BRN is None:
        return visible
    ordinals = slots // block + 1
    member = torch.zeros(*first_BR.shape, ordinals + 1, dtype=torch.bool, device=first_BR.device)
    member.scatter_(2, torch.where(pool_BRN < 0, ordinals, pool_BRN.clamp(max=ordinals)), True)
    ordinal = (slot_F - first_BR[..., None]).div(block, rounding_mode="floor").clamp_(0, ordinals - 1)
    return visible & member.gather(2, ordinal)


def highest(score: Tensor, k: int) -> Tensor:
    """Places of the k highest finite scores along the last dimension, ascending, ties to the lowest place, -1 at the end."""
    places = score.shape[-1]
    slot = torch.arange(places, device=score.device)
    count = min(k, places)
    if count == 0:
        return torch.full((*score.shape[:-1], k), -1, device=score.device)
    finite = score > -torch.inf
    if count < places:
        # torch.topk is exact in its values but breaks ties as it likes: keep its threshold, choose among equals ourselves.
        threshold = score.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
        above = score > threshold
        equal = (score == threshold) & finite
        finite = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    order = torch.where(finite, slot, places).topk(count, -1, largest=False, sorted=True).values
    index = order.masked_fill(order == places, -1)
    return torch.nn.functional.pad(index, (0, k - count), value=-1)


def _block_scores(score_BRF: Tensor, first_BR: Tensor, last_BR: Tensor, block: int) -> Tensor:
    """The highest visible score of each block, [B,R,blocks]; +inf for the newest block, -inf where nothing is visible."""
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
