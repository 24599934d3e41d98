"""Training loss of the indexer: the KL divergence from the attention over bank slots to the indexer's distribution.

The teacher is the attention probability of each bank slot that a row sees, summed over heads and normalised over these
slots. It has no gradient.

    p_tj ~ sum_h exp(z_thj) / ( sum_window exp(z_thi) + sum_bank exp(z_thj') + exp(sink_h) )

    loss = mean over rows with position >= 0 of KL( p_t || softmax_j score_tj ),  score as in `gsm_kernels.index_top_k`

With `dense`, the slots j are all in [first, last), and in the row's pool if there is one. Otherwise they are the slots
in index_BRK, and both distributions are normalised over them. Padding, and rows that see no slot, contribute 0.

Only index_query, index_weight and index_key get gradients. They are computed with the loss, chunk by chunk, so that no
tensor of size rows x slots is stored.

Args:
    query_BRHC ... bank_BFC: the inputs of the attention, as in `gsm_kernels.attend`; the query before rotation.
    first_BR, last_BR: int64, the range [first, last) of slots that a row sees.
    index_BRK: int64, the slots that attention selected; -1 is no slot.
    index_query_BRJI, index_weight_BRJ, index_key_BFI: as in `gsm_kernels.index_top_k`; differentiable.
    dense: compare over all visible slots (True) or over the selected slots (False).
    pool_BRN, block: as in `gsm_kernels.index_top_k`; used only with `dense`.

Returns:
    IndexerLoss(loss, recall), scalars in float32, or in float64 for float64 inputs. recall is the share of the
    teacher's mass on the slots of index_BRK, averaged over rows that see a slot. It is NaN if no row sees a slot, and
    without `dense`, where the mass on other slots is not computed.

Raises:
    ValueError: if the shapes do not fit, or width or block < 1.

Source: the indexer's warm-up loss of DeepSeek-V3.2, with window, bank and sink in the teacher's denominator.
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
