"""Attention over a band of the stream, in one softmax with a sink; one latent is key and value of all heads.

`gsm_kernels.attend` without a bank. With q = RoPE_t(query) and z = q . entry / sqrt(C) over `width` entries up to t,

    out_h = RoPE_-t( sum_i exp(z_hi) entry_i / ( sum_i exp(z_hi) + exp(sink_h) ) )

Args:
    query_BRHC: not rotated; the R rows stand at the last R entries of the stream.
    window_BEC: stored and new entries in stream order, E >= R, each rotated by its own position.
    position_BR: int64, position inside its document; -1 is padding and sees nothing.
    width: entries a row sees at most, itself included; none before position 0 of its document.
    sink_H: logit of the sink, in the denominator only, not divided by sqrt(C).
    cos_BRP, sin_BRP: the angles of the rows' positions; the last 2P channels are rotated. No gradient.

Returns:
    out_BRHC in the query's dtype; 0 in rows that see nothing. Computed in float32, or float64 if that is what comes in.

Raises:
    ValueError: if the shapes do not fit or width < 1.

Source: the decoder's attention to the shared state in the global state model; sliding-window attention with one
shared key and value head (Shazeer 2019).
"""

from functools import partial

from . import launch
from .attend import flash, reference, triton
from .attend.inputs import band, check_window
from .dispatch import Impl, Op

attend_band = Op(
    "attend_band",
    reference.attend,
    (
        Impl("triton", triton.attend, triton.refuses, launch.missing),
        Impl("flash", flash.attend_band, flash.refuses, flash.missing),
    ),
    inputs=band,
    check=partial(check_window, "attend_band"),
    doc=__doc__,
)
