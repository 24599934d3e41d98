"""Index scores of selected slots, with gradients. `index_top_k` chooses slots by the same scores, without gradients.

    score_tk = sum_j weight_tj relu(query_tj . key_f),   f = index_tk

Where index_BRK is -1, the score and its gradient are 0. Keys are gathered chunk by chunk, and again in backward, so
that no tensor of size rows x K x width is stored.

Args:
    query_BRJI, weight_BRJ, key_BFI: as in `gsm_kernels.index_top_k`; differentiable.
    index_BRK: int64, the selected slots; -1 is no slot. No gradient.

Returns:
    score_BRK in the dtype of the query; computed in float32, or in float64 for float64 inputs.

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
