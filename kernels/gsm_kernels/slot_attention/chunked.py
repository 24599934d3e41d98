"""The recurrence of `gsm_kernels.slot_attention`, a chunk of tokens at a time, in plain PyTorch.

Letters: N chunks, L tokens of a chunk (i, j).

With K, V the slots that enter a chunk, d_im the sum of the log decays of slot m over the chunk's first i tokens,
G_ijm = exp(d_im - d_jm) if j <= i and both are of one document, else 0, and e_im = exp(d_im) if no document starts in
the chunk up to i, else 0,

    logit_im = scale (e_im q_i . K_m + sum_j (q_i . k_j) G_ijm write_jm)
    p_i      = softmax over m of logit_i
    out_i    = sum_m p_im e_im V_m + sum_j (sum_m p_im G_ijm write_jm) v_j
    K'_m     = e_Lm K_m + sum_j G_Ljm write_jm k_j                                         and V' likewise

Only K' and V' are computed chunk after chunk, with elementwise products. `gsm_kernels.chunks` computes the sums with G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import chunks, decayed_products, decayed_sums, halved, product, scan
from ..device import at_least_float32
from .inputs import Inputs


def slot_attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.slot_attention`."""
    tokens = inputs.query_BTHC.shape[1]
    size = halved(tokens)
    # A token that is not live writes nothing; the last chunk is padded with such tokens.
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
