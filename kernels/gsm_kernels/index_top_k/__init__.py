"""Which bank slots a row reads: an exact top-k of index scores, and a pool of blocks that narrows later choices.

Over the slots that row t sees, first_t <= f < last_t,

    score_tf = sum_j weight_tj relu(query_tj . key_f)

`index_top_k` takes the k highest, `candidate_pool` the blocks of slots with the highest maxima. Both are exact and
break ties towards the lowest slot (ties are common: a score is 0 whenever no head fires, and -0.0 counts as 0). A
slot whose score is -inf or not a number is never chosen. No gradient flows.

index_top_k(query_BRJI, weight_BRJ, key_BFI, first_BR, last_BR, k, pool_BRN=None, block=8) -> index_BRK, int64:
    k slots in ascending order, -1 at the end where a row sees fewer. With a pool, a row chooses among the slots whose
    block ordinal (f - first) // block is in its pool; -1 in the pool is no block.

candidate_pool(query_BRJI, weight_BRJ, key_BFI, first_BR, last_BR, blocks, block=8) -> pool_BRN, int64:
    N = `blocks` block ordinals in ascending order, -1 at the end. The block that holds slot last-1 is always among
    them.

Args:
    query_BRJI, key_BFI: index queries and keys, already rotated; F may be 0.
    weight_BRJ: head weights, any sign, any scale already applied.
    first_BR, last_BR: int64, the contiguous range of slots a row sees; first >= last is none.

Raises:
    ValueError: if the shapes do not fit, or k, blocks or block < 1.

Source: DeepSeek-V3.2's lightning indexer; the pool is V4.1's hierarchical selection.
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
