"""Attention to M slots that every token is written to: gated slot attention.

For every token t, from the slots that the tokens before it have left, each a key K_m and a value V_m of width C,

    K, V   <-  0                                            where a document starts (start_t)
    K_m    <-  exp(log_decay_tm) K_m + write_tm k_t
    V_m    <-  exp(log_decay_tm) V_m + write_tm v_t
    out_t   =  sum_m p_m V_m                                p = softmax over m of scale K_m . q_t

A token that is not live (padding) leaves the slots as they are, whatever its other arguments are, and its output is 0.

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
    ValueError: if the shapes do not fit, or there is no token.

Source: the recurrence of Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", in
which write is 1 - exp(log_decay).
"""

from ..chunks import too_short
from ..dispatch import Impl, Op
from . import chunked, fla, reference
from .inputs import Inputs, check

slot_attention = Op(
    "slot_attention",
    reference.slot_attention,
    (Impl("fla", fla.slot_attention, fla.refuses, fla.missing), Impl("chunked", chunked.slot_attention, too_short)),
    inputs=Inputs,
    check=check,
    doc=__doc__,
)
