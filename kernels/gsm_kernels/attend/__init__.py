"""Attention over a window and selected bank entries, in one softmax with a sink; an entry is both key and value.

With q = RoPE_t(query) and z = q . entry / sqrt(C) over the entries that row t sees,

    out_h = RoPE_-t( sum_i exp(z_hi) entry_i / ( sum_i exp(z_hi) + exp(sink_h) ) )

Window and bank entries are passed in rotated, each by its position, so that the output depends only on relative
positions. All heads share the entries. An entry that is both in the window and selected, or selected twice, counts
twice. A row that sees no entry returns 0.

Letters: B sequences, R rows (queries), H heads, C channels, E window entries, P rotated pairs of channels, F bank
slots, K selected slots per row.

Args:
    query_BRHC: queries before rotation. Row r is at entry E - R + r of the window.
    window_BEC: stored and new window entries in stream order, E >= R.
    position_BR: int64, position of the row in its document; -1 is padding, which sees no window entry.
    width: entries of the window that a row sees at most, itself included; all are in its document.
    sink_H: logit of the sink, which adds to the denominator only. It is not divided by sqrt(C).
    cos_BRP, sin_BRP: cosine and sine of the rows' angles; the last 2P channels are rotated. No gradient.
    bank_BFC: bank entries; F may be 0.
    index_BRK: int64, selected slots of the bank; -1 is no slot. No gradient.
    bias_BRK: added to z of the selected slots, in all heads; None: no bias. It has no effect, and gradient 0, where
        index_BRK is -1.

Returns:
    out_BRHC in the dtype of the query; computed in float32, or in float64 for float64 inputs.

Raises:
    ValueError: if the shapes do not fit, or width < 1.

Source: compressed sparse attention of DeepSeek-V4.1-Flash; the sink of Xiao et al. 2023 with a learned logit.
"""

from .. import launch
from ..dispatch import Impl, Op
from . import reference, triton
from .inputs import Inputs, check

attend = Op(
    "attend",
    reference.attend,
    (Impl("triton", triton.attend, triton.refuses, launch.missing),),
    inputs=Inputs,
    check=check,
    doc=__doc__,
)
