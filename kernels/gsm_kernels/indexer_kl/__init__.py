"""The indexer's training loss: its distribution over bank slots against where attention looked.

The teacher, without a gradient, is the attention mass over the slots that a row sees, summed over heads and normalised:

    p_tj ~ sum_h exp(z_thj) / ( sum_window exp(z_thi) + sum_bank exp(z_thj') + exp(sink_h) )

    loss = mean over rows with position >= 0 of KL( p_t || softmax_j score_tj ),  score as in `gsm_kernels.index_top_k`

Dense: over every slot in [first, last), and in the row's pool if there is one. Sparse: over the slots of index_BRK,
both sides renormalised over them. A row that sees no slot, or is padding, contributes 0. Gradients flow to index_query,
index_weight and index_key, and to nothing else; they are computed with the loss, chunk by chunk, so that nothing of
size rows x slots is kept.

Args:
    query_BRHC ... bank_BFC: what the attention reads, as in `gsm_kernels.attend`; the query not rotated.
    first_BR, last_BR: int64, the contiguous range of slots a row sees.
    index_BRK: int64, the slots that attention selected, -1 = none.
    index_query_BRJI, index_weight_BRJ, index_key_BFI: as in `gsm_kernels.index_top_k`; differentiable.
    dense: whether teacher and indexer range over all visible slots or over the selected ones.
    pool_BRN, block: as in `gsm_kernels.index_top_k`; used by the dense form only.

Returns:
    IndexerLoss(loss, recall), scalars in float32 or wider. recall is the share of the teacher's mass on index_BRK,
    the mean over rows that see a slot; NaN in the sparse form, which does not know the mass elsewhere, and if no row
    sees a slot.

Raises:
    ValueError: if the shapes do not fit or width < 1.

Source: DeepSeek-V3.2's indexer warm-up loss, with the teacher's denominator over window, bank and sink.
"""

from torch import Tensor

from ..attend import require_window
from ..dispatch import Impl, Op
from ..launch import missing
from ..shapes import agree, require
from . import reference, triton
from .reference import IndexerLoss

__all__ = ["IndexerLoss", "indexer_kl"]


def check(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    bank_BFC: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    index_BRK: Tensor,
    index_query_BRJI: Tensor,
    index_weight_BRJ: Tensor,
    index_key_BFI: Tensor,
    dense: bool = True,
    pool_BRN: Tensor | None = None,
    block: int = 8,
) -> None:
    """Raises ValueError, in one sentence, if a letter has two sizes, the window is narrower than 1 or shorter than the
    rows, channels are odd or fewer than are rotated, or block is below 1."""
    sizes = agree(
        "indexer_kl",
        query_BRHC=query_BRHC,
        window_BEC=window_BEC,
        position_BR=position_BR,
        sink_H=sink_H,
        cos_BRP=cos_BRP,
        sin_BRP=sin_BRP,
        bank_BFC=bank_BFC,
        first_BR=first_BR,
        last_BR=last_BR,
        index_BRK=index_BRK,
        index_query_BRJI=index_query_BRJI,
        index_weight_BRJ=index_weight_BRJ,
        index_key_BFI=index_key_BFI,
        **({} if pool_BRN is None else {"pool_BRN": pool_BRN}),
    )
    require_window("indexer_kl", sizes, width)
    require("indexer_kl", block >= 1, f"block = {block} must be at least 1")


indexer_kl = Op(
    "indexer_kl",
    reference.indexer_kl,
    (Impl("triton", triton.indexer_kl, triton.refuses, missing),),
    check=check,
    doc=__doc__,
)
