"""Gated slot attention: a recurrence that writes every token to M slots, and reads them by softmax attention.

For every token t, from the slots that the tokens before it have left, each a key K_m and a value V_m of width C,

    K, V   <-  0                                            where a document starts (start_t)
    K_m    <-  exp(log_decay_tm) K_m + write_tm k_t
    V_m    <-  exp(log_decay_tm) V_m + write_tm v_t
    out_t   =  sum_m p_m V_m                                p = softmax over m of scale K_m . q_t

A token that is not live (padding) leaves the slots unchanged, and its output is 0.

Args:
    query_BTHC, key_BTHC, value_BTHC: queries, keys and values of the tokens.
    write_BTHM: strength with which a token is written to each slot.
    log_decay_BTHM: logarithm of the fraction of each slot that remains, at most 0.
    start_BT: bool, the token is the first of its document.
    live_BT: bool, False for padding.
    state_BHMU: the slots before the first token, key and value side by side: U = 2 C.
    scale: factor of the logits.

Returns:
    out_BTHC in the query's dtype, and the slots after the last token in at least float32. All is computed in at least
    float32. Differentiable in all floating-point tensors.

Raises:
    ValueError: if the shapes do not fit.

Source: the recurrence of Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", in
which write is 1 - exp(log_decay).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.layers.chunks import chunks, decayed_products, decayed_sums, halved, product, scan, too_short
from gsm_kernels import Impl, Op
from gsm_kernels.device import at_least_float32
from gsm_kernels.shapes import agree


class Inputs(NamedTuple):
    """The parameters of `slot_attention`, documented above."""

    query_BTHC: Tensor
    key_BTHC: Tensor
    value_BTHC: Tensor
    write_BTHM: Tensor
    log_decay_BTHM: Tensor
    start_BT: Tensor
    live_BT: Tensor
    state_BHMU: Tensor
    scale: float = 1.0


def _token_by_token(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute the equations above token by token."""
    query, key, value, write, log_decay = (at_least_float32(x) for x in inputs[:5])
    entry, state, outs = torch.cat((key, value), dim=-1), at_least_float32(inputs.state_BHMU), []
    for t in range(query.shape[1]):
        before, live_B111 = state, inputs.live_BT[:, t, None, None, None]
        state = state.masked_fill(inputs.start_BT[:, t, None, None, None], 0) * log_decay[:, t, :, :, None].exp()
        state = torch.where(live_B111, state + write[:, t, :, :, None] * entry[:, t, :, None], before)
        # Sums, because autocast would round the gradients of matrix products.
        keys_BHMC, values_BHMC = state.chunk(2, dim=-1)
        weight_BHM = (inputs.scale * (keys_BHMC * query[:, t, :, None]).sum(-1)).softmax(-1)
        outs.append(torch.where(live_B111[..., 0], (weight_BHM[..., None] * values_BHMC).sum(-2), 0))
    return torch.stack(outs, dim=1).to(inputs.query_BTHC.dtype), state


def _chunked(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute a chunk of tokens at a time, in plain PyTorch.

    Letters: N chunks, L tokens of a chunk (i, j).

    With K, V the slots that enter a chunk, d_im the sum of the log decays of slot m over the chunk's first i tokens,
    G_ijm = exp(d_im - d_jm) if j <= i and both are of one document, else 0, and e_im = exp(d_im) if no document starts
    in the chunk up to i, else 0,

        logit_im = scale (e_im q_i . K_m + sum_j (q_i . k_j) G_ijm write_jm)
        p_i      = softmax over m of logit_i
        out_i    = sum_m p_im e_im V_m + sum_j (sum_m p_im G_ijm write_jm) v_j
        K'_m     = e_Lm K_m + sum_j G_Ljm write_jm k_j                                         and V' likewise

    Only K' and V' are computed chunk after chunk, elementwise. `gsm.layers.chunks` computes the sums with G.
    """
    tokens = inputs.query_BTHC.shape[1]
    size = halved(tokens)
    # A token that is not live does not write. The last chunk is padded with such tokens.
    idle_BT11 = ~inputs.live_BT[..., None, None]
    query, key, value, write, log_decay = (
        chunks(at_least_float32(x).masked_fill(idle_BT11, 0), size) for x in inputs[:5]
    )
    total, entry = log_decay.cumsum(-2), torch.cat((key, value), dim=-1)
    begun = chunks((inputs.start_BT & inputs.live_BT).long()[..., None], size).cumsum(-1)
    first, together = (begun == 0)[..., None], (begun[..., :, None] == begun[..., None, :]).tril()
    leaving = (write * (total[..., -1:, :] - total).exp()).masked_fill(~together[..., -1, :, None], 0)
    decay = total.exp().masked_fill(~first, 0)
    before, state_BHMU = scan(decay[..., -1, :, None], product(leaving.mT, entry), at_least_float32(inputs.state_BHMU))
    keys, values = before.chunk(2, dim=-1)
    near = product(query, key.mT).masked_fill(~together, 0)
    logit = decay * product(query, keys.mT) + decayed_sums(near, write, total)
    weight = (inputs.scale * logit).softmax(-1)
    mixture = decayed_products(weight, write, total).masked_fill(~together, 0)
    out = product(weight * decay, values) + product(mixture, value)
    out_BTHC = out.movedim(1, 3).flatten(1, 2)[:, :tokens].masked_fill(idle_BT11, 0)
    return out_BTHC.to(inputs.query_BTHC.dtype), state_BHMU


slot_attention = Op(
    "slot_attention",
    _token_by_token,
    (Impl("chunked", _chunked, too_short),),
    inputs=Inputs,
    check=partial(agree, "slot_attention"),
    doc=__doc__,
)
