"""The recurrence of `gsm_kernels.delta_rule`, a chunk of tokens at a time, in plain PyTorch.

Letters: N chunks, L tokens of a chunk (i, j).

With S the state that enters a chunk and d_i the sum of the log decays of its first i tokens,

    G_ij = exp(d_i - d_j)     if j <= i and both are in one document, else 0: decay of a write at j until i
    e_i  = exp(d_i)           if no document starts in the chunk up to i, else 0: decay of S until i
    w_i  = beta_i (v_i - e_i S^T k_i - sum_{j<i} G_ij (k_i . k_j) w_j)                     the write of token i

The equations of the writes are triangular, and linear in S: one solve for all chunks at once gives w = U - R S (R = 0
and U = v without the delta rule). Then a chunk is one linear map of the state, and its outputs are another,

    S'    = (e_L - K'^T R) S + K'^T U,       K'_j = G_Lj k_j
    out   = (e q - P R) S + P U,             P_ij = G_ij (q_i . k_j)

so that only S' is computed chunk after chunk. This is the WY form of Yang et al. 2024, "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", with document boundaries as zeros in G and e.

If every key channel c has its own decay, d_i, e_i and G_ij are vectors, e multiplies keys and queries channel by
channel, and G_ij (k_i . k_j) becomes sum_c k_ic G_ijc k_jc, which `gsm_kernels.chunks` computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import CHUNK, chunks, decayed_products, halved, product, scan
from ..device import at_least_float32, full_precision, once
from .inputs import Inputs


def delta_rule(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.delta_rule`."""
    tokens = inputs.query_BTHC.shape[1]
    size = min(tokens, CHUNK) if inputs.channel_decay_BTHC is None else halved(tokens)
    # A token that is not live reads and writes nothing; the last chunk is padded with such tokens.
    idle_BT11 = ~inputs.live_BT[..., None, None]
    query, key, value = (chunks(at_least_float32(x).masked_fill(idle_BT11, 0), size) for x in inputs[:3])
    log_decay = total = None
    if inputs.log_decay_BTH is not None:
        log_decay = chunks(at_least_float32(inputs.log_decay_BTH).masked_fill(idle_BT11[..., 0], 0), size)
    if inputs.channel_decay_BTHC is not None:
        total = chunks(at_least_float32(inputs.channel_decay_BTHC).masked_fill(idle_BT11, 0), size).cumsum(-2)
    left, entering = _decays(chunks((inputs.start_BT & inputs.live_BT).long()[..., None], size), log_decay, value.dtype)
    overlap = None if total is None else decayed_products(torch.stack((query, key)), key, total)
    read = left * (product(query, key.mT) if overlap is None else overlap[0])
    # Queries and keys on the entering state, and keys in the final state.
    query_on_state, key_on_state, leaving = query, key, key
    decay = entering[..., -1, None, None]
    if total is not None:
        query_on_state, key_on_state = query * total.exp(), key * total.exp()
        leaving = key * (total[..., -1:, :] - total).exp()
        decay = decay * total[..., -1, :, None].exp()
    leaving = (left[..., -1, :, None] * leaving).mT
    seen = entering[..., None] * query_on_state
    if inputs.beta_BTH is not None:
        beta = chunks(at_least_float32(inputs.beta_BTH), size)[..., None]
        # The solver ignores the diagonal and everything above it.
        below = beta * left * (product(key, key.mT) if overlap is None else overlap[1])
        right = torch.cat((beta * value, beta * entering[..., None] * key_on_state), dim=-1)
        value, undone = _Solution.apply(below, right).chunk(2, dim=-1)  # U and R: the writes are U - R S
        seen = seen - product(read, undone)
        decay = decay * torch.eye(key.shape[-1], dtype=key.dtype, device=key.device) - product(leaving, undone)
    before, state_BHCC = scan(decay, product(leaving, value), at_least_float32(inputs.state_BHCC))
    out_BHNLC = inputs.scale * (product(seen, before) + product(read, value))
    out_BTHC = out_BHNLC.movedim(1, 3).flatten(1, 2)[:, :tokens]
    return out_BTHC.to(inputs.query_BTHC.dtype), state_BHCC


def _decays(start_B1NL: Tensor, log_decay_BHNL: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return G [B, H, N, L, L] and e [B, H, N, L]; without decay they are equal for all heads, H = 1."""
    begun = start_B1NL.cumsum(-1)
    first, together = begun == 0, (begun[..., :, None] == begun[..., None, :]).tril()
    if log_decay_BHNL is None:
        return together.to(dtype), first.to(dtype)
    total = log_decay_BHNL.cumsum(-1)
    # Masked before exp, so that values above the diagonal can neither overflow nor get a gradient.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~together, 0)
    return between.exp() * together, total.exp() * first


class _Solution(torch.autograd.Function):
    """The solution X of (1 + A) X = B, where A is the strictly lower triangle of `below`."""

    @staticmethod
    def forward(ctx, below, right):
        solution = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
        ctx.save_for_backward(below, solution)
        return solution

    @staticmethod
    @once
    def backward(ctx, grad):
        below, solution = ctx.saved_tensors
        with full_precision(grad):
            right_grad = torch.linalg.solve_triangular(below.mT, grad, upper=True, unitriangular=True)
            return -(right_grad @ solution.mT).tril(-1), right_grad
