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

from ..dispatch import Impl, Op
from ..launch import missing
from . import reference, triton
from .inputs import IndexerLoss, Inputs, check

__all__ = ["IndexerLoss", "indexer_kl"]

indexer_kl = Op(
    "indexer_kl",
    reference.indexer_kl,
    (Impl("triton", triton.indexer_kl, triton.refuses, missing),),
    inputs=Inputs,
    check=check,
    doc=__doc__,
)
