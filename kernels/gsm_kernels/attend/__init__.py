"""Attention over a window and a selection from a bank, in one softmax with a sink; one latent is key and value.

With q = RoPE_t(query) and z = q . entry / sqrt(C) over the entries that row t sees,

    out_h = RoPE_-t( sum_i exp(z_hi) entry_i / ( sum_i exp(z_hi) + exp(sink_h) ) )

Window and bank entries arrive rotated, each by its own position, so that after the inverse rotation only relative
positions remain. An entry that a row sees twice, in the window and in the selection or twice in the selection, counts
twice. A row that sees nothing returns 0.

Args:
    query_BRHC: not rotated; the R rows stand at the last R entries of the window's stream.
    window_BEC: stored and new window entries in stream order, E >= R.
    position_BR: int64, position inside its document; -1 is padding and sees no window entry.
    width: entries a row sees at most, itself included; none before position 0 of its document.
    sink_H: logit of the sink, in the denominator only, not divided by sqrt(C).
    cos_BRP, sin_BRP: the angles of the rows' positions; the last 2P channels are rotated. No gradient.
    bank_BFC: bank entries, F may be 0.
    index_BRK: int64 slots of the bank, -1 = no entry. No gradient.
    bias_BRK: added to z of the slots of index_BRK, in all heads; None: nothing is. Where there is no entry, it changes
        nothing, and its gradient is 0.

Returns:
    out_BRHC in the query's dtype. Computed in float32, or in float64 if that is what comes in.

Raises:
    ValueError: if the shapes do not fit or width < 1.

Source: DeepSeek-V4.1-Flash's compressed sparse attention; the sink is that of Xiao et al. 2023 in its learned form.
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
