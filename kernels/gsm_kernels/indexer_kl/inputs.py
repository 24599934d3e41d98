"""The inputs and the result of `indexer_kl`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..attend.inputs import Inputs as Attention
from ..attend.inputs import check_window
from ..indexer import Indexer
from ..shapes import require


class IndexerLoss(NamedTuple):
    """The result of `indexer_kl`.

    Attributes:
        loss: scalar.
        recall: scalar without gradient, the share of the teacher's mass on the selected slots.
    """

    loss: Tensor
    recall: Tensor | None


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.indexer_kl`, documented there."""

    query_BRHC: Tensor
    window_BEC: Tensor
    position_BR: Tensor
    width: int
    sink_H: Tensor
    cos_BRP: Tensor
    sin_BRP: Tensor
    bank_BFC: Tensor
    first_BR: Tensor
    last_BR: Tensor
    index_BRK: Tensor
    index_query_BRJI: Tensor
    index_weight_BRJ: Tensor
    index_key_BFI: Tensor
    dense: bool = True
    pool_BRN: Tensor | None = None
    block: int = 8

    @property
    def indexer(self) -> Indexer:
        """The inputs of the index scores, the only ones with a gradient."""
        return Indexer(self.index_query_BRJI, self.index_weight_BRJ, self.index_key_BFI)

    @property
    def attention(self) -> Attention:
        """The inputs of the teacher's attention, without a selection."""
        return Attention(*self[:8], index_BRK=None)

    @property
    def compared(self) -> int:
        """Number of slots per row in the comparison: F with `dense`, else K."""
        return self.bank_BFC.shape[1] if self.dense else self.index_BRK.shape[2]


def check(inputs: Inputs) -> None:
    """Check the inputs.

    Raises:
        ValueError: as `check_window`, or if block < 1.
    """
    check_window("indexer_kl", inputs)
    require("indexer_kl", inputs.block >= 1, f"block must be at least 1, got {inputs.block}")
