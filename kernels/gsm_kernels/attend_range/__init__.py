"""Softmax attention with separate keys and values, in which every row sees one contiguous range of slots.

With z_hi = query_h . key_gi / sqrt(C) over the slots i in [first, last) of the row, and g = h // (H / G) the group of
head h,

    out_h = sum_i exp(z_hi) value_gi / sum_i exp(z_hi)

Heads of a group share keys and values: G = H is multi-head attention, G = 1 multi-query, and 1 < G < H grouped-query. A
row that sees no slot returns 0.

Letters: B sequences, R rows (queries), H query heads, G key and value heads, C channels, F slots.

Args:
    query_BRHC: queries; rotate them before, if positions are rotary.
    key_BFGC, value_BFGC: keys and values of the slots; F may be 0. H must be a multiple of G.
    first_BR, last_BR: int64, the range [first, last) of slots that a row sees; empty if first = last.
    width: with an integer, the caller guarantees that F >= R, that row r is at slot F - R + r, and that it sees at most
        the last `width` slots up to its own. All implementations but the reference then cost O(R width) instead of
        O(R F). None: no guarantee.
    whole: with True, the caller guarantees that row r sees every slot up to its own, F - R + r, or with `width` the
        last `width` of them. Implementations may then ignore first_BR and last_BR, instead of reading them back from
        the device.

Returns:
    out_BRHC in the dtype of the query; computed in float32, or in float64 for float64 inputs. On a GPU, fast
    implementations multiply bfloat16 and float16 as they are, and sum in float32.

Raises:
    ValueError: if the shapes do not fit, width < 1, or G does not divide H.

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
