"""The index scores of slots that are selected already, with gradients; `index_top_k` ranked the slots by these scores.

    score_tk = sum_j weight_tj relu(query_tj . key_f),   f = index_tk

A place without a slot scores 0 and gives no gradient. Keys are gathered chunk by chunk, in backward once more, so that
nothing of size rows x slots x width is kept.

Args:
    query_BRJI, weight_BRJ, key_BFI: as in `gsm_kernels.index_top_k`; differentiable.
    index_BRK: int64 slots, -1 = none. No gradient.

Returns:
    score_BRK in the query's dtype. Computed in float32, or in float64 if that is what comes in.

Raises:
    ValueError: if the shapes do not fit.

Source: the score of DeepSeek-V3.2's lightning indexer.
"""

from ..dispatch import Impl, Op
from ..launch import missing
from . import reference, triton
from .reference import Inputs, check

score_slots = Op(
    "score_slots",
    reference.score_slots,
    (Impl("triton", triton.score_slots, triton.refuses, missing),),
    inputs=Inputs,
    check=check,
    doc=__doc__,
)
