"""The recurrence of `gsm_kernels.delta_rule`, a chunk of tokens at a time, in plain PyTorch.

Letters: N chunks, L tokens of a chunk (i, j).

With S the state that enters a chunk and d_i the sum of the log decays of its first i tokens,

    G_ij = exp(d_i - d_j)     if j <= i and both are of one document, else 0: what is left at i of a write at j
    e_i  = exp(d_i)           if no document starts in the chunk up to i, else 0: what is left at i of S
    w_i  = beta_i (v_i - e_i S^T k_i - sum_{j<i} G_ij (k_i . k_j) w_j)                     the write of token i

The writes are triangular in themselves, and linear in S: one solve for all chunks at once gives w = U - R S (R = 0 and
U = v without the delta rule). Then a chunk is one linear map of the state, and its outputs another,

    S'    = (e_L - K'^T R) S + K'^T U,       K'_j = G_Lj k_j
    out   = (e q - P R) S + P U,             P_ij = G_ij (q_i . k_j)

so that only S' has to be computed chunk after chunk. This is the WY form of Yang et al. 2024, "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", with the documents as zeros in G and e.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import at_least_float32, full_precision
from .inputs import Inputs

CHUNK = 32


def refuses(inputs: Inputs) -> str | None:
    """Why this form is not for a call: a token at a time the equations themselves are faster."""
    return "a single token makes no chunk" if inputs.query_BTHC.shape[1] == 1 else None


def delta_rule(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.delta_rule`."""
    tokens = inputs.query_BTHC.shape[1]
    size = min(tokens, CHUNK)
    # A token that is not live reads and writes nothing; the last chunk is filled up with such tokens.
    idle_BT11 = ~inputs.live_BT[..., None, None]
    query, key, value = (_chunks(at_least_float32(x).masked_fill(idle_BT11, 0), size) for x in inputs[:3])
    log_decay = None
    if inputs.log_decay_BTH is not None:
        log_decay = _chunks(at_least_float32(inputs.log_decay_BTH).masked_fill(idle_BT11[..., 0], 0), size)
    left, entering = _what_is_left(
        _chunks((inputs.start_BT & inputs.live_BT).long()[..., None], size), log_decay, value.dtype
    )
    read = left * _product(query, key.mT)
    leaving = (left[..., -1, :, None] * key).mT
    seen, kept = entering[..., None] * query, entering[..., -1, None, None]
    if inputs.beta_BTH is not None:
        value, undone = _writes(key, value, _chunks(at_least_float32(inputs.beta_BTH), size), left, entering)
        seen = seen - _product(read, undone)
        kept = kept * torch.eye(key.shape[-1], dtype=key.dtype, device=key.device) - _product(leaving, undone)
    before, state_BHCC = _scan(kept, _product(leaving, value), at_least_float32(inputs.state_BHCC))
    out_BHNLC = inputs.scale * (_product(seen, before) + _product(read, value))
    out_BTHC = out_BHNLC.movedim(1, 3).flatten(1, 2)[:, :tokens]
    return out_BTHC.to(inputs.query_BTHC.dtype), state_BHCC


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, H, ...] as [B, H, N, L, ...], filled up with zeros."""
    missing = -x.shape[1] % size
    padded = F.pad(x, (0,) * (2 * x.ndim - 4) + (0, missing)) if missing else x
    return padded.unflatten(1, (-1, size)).movedim(3, 1).contiguous()


def _what_is_left(start_B1NL: Tensor, log_decay_BHNL: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """G [B, H, N, L, L] and e [B, H, N, L]; without decay they are the same for all heads, H = 1."""
    begun = start_B1NL.cumsum(-1)
    first, together = begun == 0, (begun[..., :, None] == begun[..., None, :]).tril()
    if log_decay_BHNL is None:
        return together.to(dtype), first.to(dtype)
    total = log_decay_BHNL.cumsum(-1)
    # Zero before exp, so that what is above the diagonal can neither overflow nor reach a gradient.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~together, 0)
    return between.exp() * together, total.exp() * first


def _writes(
    key_BHNLC: Tensor, value_BHNLC: Tensor, beta_BHNL: Tensor, left_BHNLL: Tensor, entering_BHNL: Tensor
) -> tuple[Tensor, Tensor]:
    """U and R, [B, H, N, L, C] each: the writes of the delta rule are U - R S."""
    beta = beta_BHNL[..., None]
    below = beta * left_BHNLL * _product(key_BHNLC, key_BHNLC.mT)  # on and above the diagonal the solver looks at none
    right = torch.cat((beta * value_BHNLC, beta * entering_BHNL[..., None] * key_BHNLC), dim=-1)
    fresh, undone = _Solution.apply(below, right).chunk(2, dim=-1)
    return fresh, undone


def _scan(kept: Tensor, added_BHNCC: Tensor, state_BHCC: Tensor) -> tuple[Tensor, Tensor]:
    """The state before every chunk, [B, H, N, C, C], and the one after the last. ``kept`` multiplies it as a matrix
    [C, C], or as a number [1, 1]."""
    before = []
    for keep, add in zip(kept.unbind(2), added_BHNCC.unbind(2), strict=True):
        before.append(state_BHCC)
        state_BHCC = (_product(keep, state_BHCC) if keep.shape[-1] > 1 else keep * state_BHCC) + add
    return torch.stack(before, dim=2), state_BHCC


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, of which autocast lowers not even the gradients."""
    return _Product.apply(left, right)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    def backward(ctx, grad):
        left, right = ctx.saved_tensors
        with full_precision(grad):
            return (
                grad @ right.mT if ctx.needs_input_grad[0] else None,
                left.mT @ grad if ctx.needs_input_grad[1] else None,
            )


class _Solution(torch.autograd.Function):
    """X of (1 + A) X = B, where A is what lies below the diagonal."""

    @staticmethod
    def forward(ctx, below, right):
        solution = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
        ctx.save_for_backward(below, solution)
        return solution

    @staticmethod
    def backward(ctx, grad):
        below, solution = ctx.saved_tensors
        with full_precision(grad):
            right_grad = torch.linalg.solve_triangular(below.mT, grad, upper=True, unitriangular=True)
            return -(right_grad @ solution.mT).tril(-1), right_grad
