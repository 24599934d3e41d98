"""Attention over a band of the stream, in one softmax with a sink; one latent is key and value of all heads.

`gsm_kernels.attend` without a bank. With q = RoPE_t(query) and z = q . entry / sqrt(C) over `width` entries up to t,

    out_h = RoPE_-t( sum_i exp(z_hi) entry_i / ( sum_i exp(z_hi) + exp(sink_h) ) )

Args:
    query_BRHC: not rotated; the R rows stand at the last R entries of the stream.
    entry_BEC: stored and new entries in stream order, E >= R, each rotated by its own position.
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

from torch import Tensor

from ..attend import require_window
from ..dispatch import Impl, Op
from ..launch import missing
from ..shapes import agree
from . import reference, triton


def check(
    query_BRHC: Tensor,
    entry_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
) -> None:
    """Raises ValueError, in one sentence, if a letter has two sizes, the window is narrower than 1 or shorter than the
    rows, or channels are odd or fewer than are rotated."""
    sizes = agree(
        "attend_band",
        query_BRHC=query_BRHC,
        entry_BEC=entry_BEC,
        position_BR=position_BR,
        sink_H=sink_H,
        cos_BRP=cos_BRP,
        sin_BRP=sin_BRP,
    )
    require_window("attend_band", sizes, width)


attend_band = Op(
    "attend_band",
    reference.attend_band,
    (Impl("triton", triton.attend_band, triton.refuses, missing),),
    check=check,
    doc=__doc__,
)
