"""Common parts of recurrences that are computed a chunk of tokens at a time: cutting into chunks, the state from chunk
to chunk, and sums over a chunk with a separate decay for every channel.

With d_i the sum of a channel's log decays up to token i, the fraction exp(d_i - d_j) of token j's write remains at a
later token i. The factors exp(d_i) and exp(-d_j) would make this a matrix product, but the second may overflow. So a
chunk is cut into halves; m is the last token of the first half. For i after the cut and j before it, exp(d_i - d_m) and
exp(d_m - d_j) are both at most 1, and if one underflows to 0, so does the product. Each half is cut in the same way,
down to single tokens, which need no decay.

Letters: N chunks, L tokens of a chunk (i, j), a power of two; C channels. All tensors may have the same leading
dimensions, and rows may have more of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsm_kernels.device import full_precision, once

CHUNK = 32  # largest number of tokens in a chunk


def too_short(inputs: Any) -> str | None:
    """Return why a call cannot be computed in chunks, or None. For a single token, the plain equations are faster."""
    return "a single token makes no chunk" if inputs.query_BTHC.shape[1] == 1 else None


def chunks(x: Tensor, size: int) -> Tensor:
    """Reshape [B, T, H, ...] to [B, H, N, L, ...], padded with zeros."""
    missing = -x.shape[1] % size
    padded = F.pad(x, (0,) * (2 * x.ndim - 4) + (0, missing)) if missing else x
    return padded.unflatten(1, (-1, size)).movedim(3, 1).contiguous()


def halved(tokens: int) -> int:
    """Return the chunk size for a number of tokens: a power of two, so that it can be halved down to single tokens."""
    return min(1 << (tokens - 1).bit_length(), CHUNK)


def scan(kept: Tensor, added_BHNRC: Tensor, state_BHRC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state before every chunk, [B, H, N, R, C], and the state after the last chunk.

    A chunk maps the state S to ``kept S + added``. ``kept`` has one matrix [R, R] per chunk, or one number for all rows
    [1, 1] or for each row [R, 1].
    """
    before = []
    for keep, add in zip(kept.unbind(2), added_BHNRC.unbind(2), strict=True):
        before.append(state_BHRC)
        state_BHRC = (product(keep, state_BHRC) if keep.shape[-1] > 1 else keep * state_BHRC) + add
    return torch.stack(before, dim=2), state_BHRC


def decayed_products(row_LC: Tensor, column_LC: Tensor, total_LC: Tensor) -> Tensor:
    """Return sum_c row_ic exp(d_ic - d_jc) column_jc for j <= i, zeros for j > i, [..., L, L]; ``total`` is d."""
    if row_LC.shape[-2] == 1:
        return (row_LC * column_LC).sum(-1, keepdim=True)
    row, column, total = (_halves(x) for x in (row_LC, column_LC, total_LC))
    first, second = decayed_products(row, column, total).unbind(-3)
    behind, before = _across(total)
    across = product(row[..., 1, :, :] * behind, (column[..., 0, :, :] * before).mT)
    upper = torch.cat((first, torch.zeros_like(across)), dim=-1)
    return torch.cat((upper, torch.cat((across, second), dim=-1)), dim=-2)


def decayed_sums(weight_LL: Tensor, value_LC: Tensor, total_LC: Tensor) -> Tensor:
    """Return sum_(j <= i) weight_ij exp(d_ic - d_jc) value_jc, [..., L, C]; ``total`` is d."""
    if value_LC.shape[-2] == 1:
        return weight_LL * value_LC
    value, total = _halves(value_LC), _halves(total_LC)
    weight = weight_LL.unflatten(-1, (2, -1)).unflatten(-3, (2, -1))
    within = torch.stack((weight[..., 0, :, 0, :], weight[..., 1, :, 1, :]), dim=-3)
    first, second = decayed_sums(within, value, total).unbind(-3)
    behind, before = _across(total)
    across = behind * product(weight[..., 1, :, 0, :], before * value[..., 0, :, :])
    return torch.cat((first, second + across), dim=-2)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, with gradients that autocast does not compute in lower precision."""
    return _Product.apply(left, right)


def _halves(x_LC: Tensor) -> Tensor:
    return x_LC.unflatten(-2, (2, -1))


def _across(total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decay from the cut to each later token, and from each earlier token to the cut."""
    before, behind = total.unbind(-3)
    cut = before[..., -1:, :]
    return (behind - cut).exp(), (cut - before).exp()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    @once
    def backward(ctx, grad):
        left, right = ctx.saved_tensors
        with full_precision(grad):
            return (
                (grad @ right.mT).sum_to_size(left.shape) if ctx.needs_input_grad[0] else None,
                (left.mT @ grad).sum_to_size(right.shape) if ctx.needs_input_grad[1] else None,
            )
