"""Plain PyTorch indexer loss, in chunks of rows; the gradients are computed with the loss and only scaled in backward.

Letters: G slots compared (all F of the bank, or the K selected), the rest as in `gsm_kernels.joint`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import at_least_float32, scratch_elements
from ..index_top_k.reference import slots_visible, weigh
from ..joint import Cut, Far, as_bias, chunks, cut, pad_rows, probabilities, window_blocks, window_visible
from ..rope import turn
from ..slots import flat_slots, gather_slots


class IndexerLoss(NamedTuple):
    """What `indexer_kl` returns: the loss, and the share of the teacher's mass that the selection holds (no
    gradient)."""

    loss: Tensor
    recall: Tensor | None


class _Teacher(NamedTuple):
    query_BRHC: Tensor
    window_BEC: Tensor
    position_BR: Tensor
    sink_H: Tensor
    cos_BRP: Tensor
    sin_BRP: Tensor
    bank_BFC: Tensor


class _Choice(NamedTuple):
    first_BR: Tensor
    last_BR: Tensor
    index_BRK: Tensor
    pool_BRN: Tensor | None


class _Student(NamedTuple):
    query_BRJI: Tensor
    weight_BRJ: Tensor
    key_BFI: Tensor


def indexer_kl(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    bank_BFC: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    index_BRK: Tensor,
    index_query_BRJI: Tensor,
    index_weight_BRJ: Tensor,
    index_key_BFI: Tensor,
    dense: bool = True,
    pool_BRN: Tensor | None = None,
    block: int = 8,
) -> IndexerLoss:
    """See `gsm_kernels.indexer_kl`."""
    student = _Student(index_query_BRJI, index_weight_BRJ, index_key_BFI)
    teacher = _Teacher(query_BRHC, window_BEC, position_BR, sink_H, cos_BRP, sin_BRP, bank_BFC)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in student)
    fixed = (*(x.detach() for x in teacher), first_BR, last_BR, index_BRK, pool_BRN)
    return IndexerLoss(*_IndexerKL.apply(*student, *fixed, width, dense, block, wants_grad))


class _IndexerKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *tensors, width, dense, block, wants_grad = arguments
        student, teacher, choice = _Student(*tensors[:3]), _Teacher(*tensors[3:10]), _Choice(*tensors[10:])
        sums = _Sums(student, wants_grad)
        for start, stop in _row_chunks(student, teacher, choice, width, dense):
            _add_chunk(sums, student, teacher, choice, slice(start, stop), width, dense, block)
        rows = (teacher.position_BR >= 0).sum().clamp(min=1)
        ctx.save_for_backward(*(grad.div_(rows) for grad in sums.grads))
        ctx.dtypes = [x.dtype for x in student]
        recall = sums.held / sums.seen if dense else torch.full_like(sums.held, torch.nan)
        ctx.mark_non_differentiable(recall)
        return sums.loss / rows, recall

    @staticmethod
    def backward(ctx, grad, _):
        grads = [(grad * saved).to(dtype) for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=False)]
        return *(grads or (None, None, None)), *(None,) * 15


class _Sums:
    """What the chunks add up to: loss, teacher mass held, rows that see a slot, and the gradients if wanted."""

    def __init__(self, student: _Student, wants_grad: bool) -> None:
        wide = torch.promote_types(student.query_BRJI.dtype, torch.float32)
        self.loss, self.held, self.seen = torch.zeros(3, dtype=wide, device=student.query_BRJI.device).unbind()
        self.grads = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in student] if wants_grad else []


def _row_chunks(
    student: _Student, teacher: _Teacher, choice: _Choice, width: int, dense: bool
) -> list[tuple[int, int]]:
    batch, rows, heads, channels = teacher.query_BRHC.shape
    _, _, index_heads, index_width = student.query_BRJI.shape
    whole = cut(rows, teacher.window_BEC.shape[1], width)
    compared = teacher.bank_BFC.shape[1] if dense else choice.index_BRK.shape[2]
    other = batch * compared * (index_heads if dense else max(index_heads, channels, index_width))
    return chunks(whole, batch * heads, compared, other, scratch_elements(teacher.query_BRHC.device))


def _add_chunk(
    sums: _Sums,
    student: _Student,
    teacher: _Teacher,
    choice: _Choice,
    rows: slice,
    width: int,
    dense: bool,
    block: int,
) -> None:
    index_BRK = choice.index_BRK[:, rows]
    visible = _compared(choice, rows, teacher.bank_BFC.shape[1], dense, block)
    visible &= (teacher.position_BR[:, rows] >= 0)[..., None]
    mass_BRG = _teacher_mass(teacher, rows, width, visible, None if dense else index_BRK)
    total = mass_BRG.sum(-1, keepdim=True)
    target_BRG = mass_BRG / total.clamp(min=torch.finfo(mass_BRG.dtype).tiny)
    # A teacher without any mass, because there is no slot or because all of it underflowed, teaches nothing.
    sees_BR = total[..., 0] > 0
    sums.loss += _divergence(sums, student, rows, target_BRG, visible, sees_BR, None if dense else index_BRK)
    if dense:
        # One column more, for -1 to find nothing in.
        held = torch.nn.functional.pad(target_BRG, (0, 1)).gather(2, index_BRK.remainder(target_BRG.shape[2] + 1))
        sums.held += held.sum()
        sums.seen += visible.any(-1).sum()


def _compared(choice: _Choice, rows: slice, slots: int, dense: bool, block: int) -> Tensor:
    """Which slots, of the bank or of the selection, teacher and indexer are compared over, bool [B,R,G]."""
    if not dense:
        return choice.index_BRK[:, rows] >= 0
    pool = None if choice.pool_BRN is None else choice.pool_BRN[:, rows]
    return slots_visible(slots, choice.first_BR[:, rows], choice.last_BR[:, rows], pool, block)


def _teacher_mass(teacher: _Teacher, rows: slice, width: int, visible: Tensor, index_BRK: Tensor | None) -> Tensor:
    """Attention probability of each compared slot, summed over heads, [B,R,G]."""
    offset = teacher.window_BEC.shape[1] - teacher.query_BRHC.shape[1]
    first, last = max(0, offset + rows.start - (width - 1)), offset + rows.stop
    blocks = cut(rows.stop - rows.start, last - first, width)
    query = at_least_float32(teacher.query_BRHC[:, rows])
    rotated = turn(query, teacher.cos_BRP[:, rows], teacher.sin_BRP[:, rows]).mul_(query.shape[-1] ** -0.5)
    far = _far(teacher.bank_BFC.to(query.dtype), visible, index_BRK, blocks)
    window = window_blocks(teacher.window_BEC[:, first:last].to(query.dtype), blocks)
    seen = window_visible(teacher.position_BR[:, rows], blocks)
    softmax = probabilities(pad_rows(rotated, blocks), window, seen, teacher.sink_H.to(query.dtype), far)
    batch, _, heads, _ = query.shape
    by_head = softmax.view(batch, blocks.padded, heads, -1)[:, : rows.stop - rows.start, :, blocks.span : -1]
    return by_head.sum(2)


def _far(bank_BFC: Tensor, visible: Tensor, index_BRK: Tensor | None, blocks: Cut) -> Far:
    bias = pad_rows(as_bias(visible, bank_BFC.dtype), blocks)
    if index_BRK is None:
        return Far(bank_BFC, bias)
    return Far(gather_slots(bank_BFC, pad_rows(index_BRK, blocks, -1)), bias)


def _divergence(
    sums: _Sums,
    student: _Student,
    rows: slice,
    target_BRG: Tensor,
    visible: Tensor,
    sees_BR: Tensor,
    index_BRK: Tensor | None,
) -> Tensor:
    """KL(target || softmax of the scores) summed over rows; adds the gradients to the sums if they are wanted."""
    query_BRJI, weight_BRJ = (at_least_float32(x[:, rows]) for x in student[:2])
    keys = at_least_float32(student.key_BFI)
    if index_BRK is not None:
        keys = gather_slots(keys, index_BRK)
    batch, length, heads, _ = query_BRJI.shape
    queries = query_BRJI.reshape(keys.shape[0], batch * length * heads // keys.shape[0], -1)
    fired_BRJG = torch.bmm(queries, keys.mT).relu_().view(batch, length, heads, -1)
    score = weigh(fired_BRJG, weight_BRJ)
    lowest, tiny = torch.finfo(score.dtype).min, torch.finfo(score.dtype).tiny
    score.masked_fill_(~visible, lowest)
    log_model = torch.log_softmax(score, -1)
    loss = (target_BRG * (target_BRG.clamp(min=tiny).log_() - log_model)).sum()
    if sums.grads:
        score_grad = torch.softmax(score, -1).mul_(sees_BR[..., None]).sub_(target_BRG)[:, :, None]
        query_grad, weight_grad, key_grad = sums.grads
        weight_grad[:, rows] = (fired_BRJG * score_grad).sum(-1)
        # Where a head fired, its gradient is its weight times the score's.
        fired_grad = fired_BRJG.sign_().mul_(weight_BRJ[..., None]).mul_(score_grad)
        fired_grad = fired_grad.view(*queries.shape[:2], fired_BRJG.shape[3])
        query_grad[:, rows] = torch.bmm(fired_grad, keys).view(query_BRJI.shape)
        _add_key_grad(key_grad, torch.bmm(fired_grad.mT, queries), index_BRK)
    return loss


def _add_key_grad(key_grad: Tensor, grad: Tensor, index_BRK: Tensor | None) -> None:
    if index_BRK is None:
        key_grad += grad
    elif key_grad.shape[1]:
        flat = flat_slots(index_BRK, key_grad.shape[1])
        key_grad.view(-1, key_grad.shape[2]).index_add_(0, flat, grad.flatten(0, 1))
