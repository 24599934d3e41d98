"""A recurrence on one matrix per head: the delta rule with or without decay, and linear attention without the rule.

For every token t, from the state S [C, C] that the tokens before it have left,

    S  <-  0                                where a document starts (start_t)
    S  <-  exp(log_decay_t) diag(exp(channel_decay_t)) S
    S  <-  S + k_t w_t^T                    w_t = beta_t (v_t - S^T k_t), the delta rule; w_t = v_t if beta is None
    out_t = scale S^T q_t

A token that is not live (padding) leaves S as it is, whatever its other arguments are, and its output is 0.

Args:
    query_BTHC, key_BTHC, value_BTHC: with unit keys, the delta rule moves the state's answer to k_t towards v_t.
    beta_BTH: strength of a write, in (0, 1), or up to 2 to let S turn back on itself; None: no delta rule.
    log_decay_BTH: logarithm of the decay, at most 0; None: no decay.
    start_BT: bool, the token is the first of its document.
    live_BT: bool, False for padding.
    state_BHCC: S before the first token, rows by key channel, columns by value channel.
    scale: factor of the outputs.
    channel_decay_BTHC: logarithm of the decay of each key channel, at most 0; None: no such decay.

Returns:
    out_BTHC in the query's dtype, and the state after the last token in at least float32. All is computed in at least
    float32. Differentiable in all floating-point tensors.

Raises:
    ValueError: if the shapes do not fit, or there is no token.

Source: the recurrences of Katharopoulos et al. 2020 (linear attention), Schlag et al. 2021 (delta rule), Yang et al.
2024b, "Gated Delta Networks", equation 10 (with decay; they write the transpose of S) and Kimi Team 2025, "Kimi Linear"
(with a decay for each channel).
"""

from ..chunks import too_short
from ..dispatch import Impl, Op
from . import chunked, fla, reference
from .inputs import Inputs, check

delta_rule = Op(
    "delta_rule",
    reference.delta_rule,
    (Impl("fla", fla.delta_rule, fla.refuses, fla.missing), Impl("chunked", chunked.delta_rule, too_short)),
    inputs=Inputs,
    check=check,
    doc=__doc__,
)
