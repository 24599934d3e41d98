"""Choose the bank slots that a row reads: the exact top-k of index scores, or first a pool of blocks to choose from.

Over the slots that row t sees, first_t <= f < last_t,

    score_tf = sum_j weight_tj relu(query_tj . key_f)

`index_top_k` returns the k slots with the highest scores. `candidate_pool` returns the blocks of slots with the highest
maximum scores. Both are exact. Of equal scores, the lowest slot is chosen first; ties are common, because a score is 0
if all products are negative, and -0.0 counts as 0. Slots with score -inf or NaN are never chosen. There is no gradient.

index_top_k(query_BRJI, weight_BRJ, key_BFI, first_BR, last_BR, k, pool_BRN=None, block=8) -> index_BRK, int64:
    k slots in ascending order, then -1 if a row sees fewer. With a pool, a row chooses among the slots whose block
    number (f - first) // block is in its pool; -1 in the pool is no block.

candidate_pool(query_BRJI, weight_BRJ, key_BFI, first_BR, last_BR, blocks, block=8) -> pool_BRN, int64:
    N = `blocks` block numbers in ascending order, then -1. The block of slot last - 1 is always chosen.

Letters: B sequences, R rows, J index heads, I their width, F bank slots, K = k.

Args:
    query_BRJI, key_BFI: index queries and keys, already rotated; F may be 0.
    weight_BRJ: weights of the heads, already scaled; they may be negative.
    first_BR, last_BR: int64, the range [first, last) of slots that a row sees; empty if first >= last.
    k, blocks: number of slots or blocks to choose.
    block: slots per block.

Raises:
    ValueError: if the shapes do not fit, or k, blocks or block < 1.

Source: the lightning indexer of DeepSeek-V3.2; the pool is the hierarchical selection of DeepSeek-V4.1.
"""

from functools import partial

from .. import launch
from ..dispatch import Impl, Op
from . import reference, triton
from .inputs import Inputs, check, pool

index_top_k = Op(
    "index_top_k",
    reference.index_top_k,
    (Impl("triton", triton.index_top_k, triton.refuses, launch.missing),),
    inputs=Inputs,
    check=partial(check, "index_top_k", "k"),
    doc=__doc__,
)
candidate_pool = Op(
    "candidate_pool",
    reference.candidate_pool,
    (Impl("triton", triton.candidate_pool, triton.refuses_pool, launch.missing),),
    inputs=pool,
    check=partial(check, "candidate_pool", "blocks"),
    doc=__doc__,
)
