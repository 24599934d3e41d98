"""Causal attention with keys and values of their own: every row sees one contiguous range of slots.

With z_hi = query_h . key_gi / sqrt(C) over the slots i in [first, last) of the row, and g = h // (H / G) the group of
head h,

    out_h = sum_i exp(z_hi) value_gi / sum_i exp(z_hi)

Heads of a group share keys and values: G = H is multi-head, G = 1 multi-query, anything between grouped-query
attention. A row that sees nothing returns 0.

Args:
    query_BRHC: rotated already, if it is at all.
    key_BFGC, value_BFGC: the slots; F may be 0. H is a multiple of G.
    first_BR, last_BR: int64, the slots [first, last) that a row sees; first = last for none.
    width: None, or the promise that slots are a stream at whose end the R rows stand, F >= R, and that row r sees at
        most the `width` slots that end with its own, F - R + r: then cost grows with R times width, not R times F, but
        for the reference's.
    whole: the promise that row r sees every slot up to its own, F - R + r, or with `width` the last `width` of them. An
        implementation may then ignore the ranges, which it would have to fetch from the device.

Returns:
    out_BRHC in the query's dtype. Computed in float32, or in float64 for inputs in float64; on a GPU, fast
    implementations multiply half types as they are and sum in float32.

Raises:
    ValueError: if the shapes do not fit, width < 1, or H is no multiple of G.

Source: scaled dot-product attention of Vaswani et al. 2017; shared key and value heads of Shazeer 2019 and Ainslie et
al. 2023; sliding windows as in Beltagy et al. 2020.
"""

from ..dispatch import Impl, Op
from . import reference, sdpa, xformers
from .reference import Inputs, check

attend_range = Op(
    "attend_range",
    reference.attend_range,
    (
        Impl("xformers", xformers.attend_range, xformers.refuses, xformers.missing),
        Impl("sdpa", sdpa.attend_range, sdpa.refuses),
    ),
    inputs=Inputs,
    check=check,
    doc=__doc__,
)
