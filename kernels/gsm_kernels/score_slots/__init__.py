"""The index scores of slots that are selected already, with gradients: what `index_top_k` ranked them by.

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

from torch import Tensor

from ..dispatch import Impl, Op
from ..launch import missing
from ..shapes import agree
from . import reference, triton


def check(query_BRJI: Tensor, weight_BRJ: Tensor, key_BFI: Tensor, index_BRK: Tensor) -> None:
    """Raises ValueError, in one sentence, if a letter has two sizes."""
    agree("score_slots", query_BRJI=query_BRJI, weight_BRJ=weight_BRJ, key_BFI=key_BFI, index_BRK=index_BRK)


score_slots = Op(
    "score_slots",
    reference.score_slots,
    (Impl("triton", triton.score_slots, triton.refuses, missing),),
    check=check,
    doc=__doc__,
)
