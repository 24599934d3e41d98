"""The arguments and the result of `indexer_kl`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..attend.inputs import Inputs as Attention
from ..attend.inputs import check_window
from ..indexer import Indexer
from ..shapes import require


class IndexerLoss(NamedTuple):
    """The result of `indexer_kl`: the loss, and the share of the teacher's mass that the selection holds (no
    gradient)."""

    loss: Tensor
    recall: Tensor | None


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.indexer_kl`, described there."""

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
        """The only inputs with a gradient."""
        return Indexer(self.index_query_BRJI, self.index_weight_BRJ, self.index_key_BFI)

    @property
    def attention(self) -> Attention:
        """The teacher's inputs."""
        return Attention(*self[:8], index_BRK=None)

    @property
    def compared(self) -> int:
        """Slots of a row that teacher and indexer are compared over: all of the bank, or the selected ones."""
        return self.bank_BFC.shape[1] if self.dense else self.index_BRK.shape[2]


def check(inputs: Inputs) -> None:
    """Raise ValueError, in one sentence, if shapes do not fit, as in `attend`, or block is below 1."""
    check_window("indexer_kl", inputs)
    require("indexer_kl", inputs.block >= 1, f"block = {inputs.block} must be at least 1")
