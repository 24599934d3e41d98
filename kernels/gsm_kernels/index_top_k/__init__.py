"""Which bank slots a row reads: an exact top-k of index scores, and a pool of blocks that narrows later choices.

Over the slots that row t sees, first_t <= f < last_t,

    score_tf = sum_j weight_tj relu(query_tj . key_f)

`index_top_k` takes the k highest, `candidate_pool` the blocks of slots with the highest maxima. Both are exact and
break ties towards the lowest slot (ties are common: a score is 0 whenever no head fires, and -0.0 counts as 0). No
gradient flows.

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

from torch import Tensor

from ..dispatch import Impl, Op
from ..launch import missing
from ..shapes import agree, require
from . import reference, triton


def check_top_k(
    query_BRJI: Tensor,
    weight_BRJ: Tensor,
    key_BFI: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    k: int,
    pool_BRN: Tensor | None = None,
    block: int = 8,
) -> None:
    """Raises ValueError, in one sentence, if a letter has two sizes, or k or block is below 1."""
    pool = {} if pool_BRN is None else {"pool_BRN": pool_BRN}
    scored = {"query_BRJI": query_BRJI, "weight_BRJ": weight_BRJ, "key_BFI": key_BFI}
    agree("index_top_k", **scored, first_BR=first_BR, last_BR=last_BR, **pool)
    require("index_top_k", k >= 1 and block >= 1, f"k = {k} and block = {block} must be at least 1")


def check_pool(
    query_BRJI: Tensor,
    weight_BRJ: Tensor,
    key_BFI: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    blocks: int,
    block: int = 8,
) -> None:
    """Raises ValueError, in one sentence, if a letter has two sizes, or blocks or block is below 1."""
    scored = {"query_BRJI": query_BRJI, "weight_BRJ": weight_BRJ, "key_BFI": key_BFI}
    agree("candidate_pool", **scored, first_BR=first_BR, last_BR=last_BR)
    require("candidate_pool", blocks >= 1 and block >= 1, f"blocks = {blocks} and block = {block} must be at least 1")


index_top_k = Op(
    "index_top_k",
    reference.index_top_k,
    (Impl("triton", triton.index_top_k, triton.refuses, missing),),
    check=check_top_k,
    doc=__doc__,
)
candidate_pool = Op(
    "candidate_pool",
    reference.candidate_pool,
    (Impl("triton", triton.candidate_pool, triton.refuses_pool, missing),),
    check=check_pool,
    doc=__doc__,
)
