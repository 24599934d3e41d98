"""What `attend` and `attend_band` are called with."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..inputs import gradients
from ..shapes import agree, require


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.attend`, which tells what they are; `attend_band` has no bank."""

    query_BRHC: Tensor
    window_BEC: Tensor
    position_BR: Tensor
    width: int
    sink_H: Tensor
    cos_BRP: Tensor
    sin_BRP: Tensor
    bank_BFC: Tensor | None
    index_BRK: Tensor | None
    bias_BRK: Tensor | None = None

    @property
    def slots(self) -> int:
        """F, if there is anything to pick."""
        return 0 if self.bank_BFC is None or self.picks == 0 else self.bank_BFC.shape[1]

    @property
    def picks(self) -> int:
        """K; 0 where nothing is picked."""
        return 0 if self.index_BRK is None else self.index_BRK.shape[2]

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """The inputs that get a gradient."""
        return self.query_BRHC, self.window_BEC, self.sink_H, self.bank_BFC, self.bias_BRK

    def gradients(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """What a backward returns, given the gradients of `learned`: one for each input, in its dtype."""
        pairs = zip(self.learned, grads, strict=True)
        query, window, sink, bank, bias = (None if x is None or grad is None else grad.to(x.dtype) for x, grad in pairs)
        return gradients(Inputs, query_BRHC=query, window_BEC=window, sink_H=sink, bank_BFC=bank, bias_BRK=bias)


def band(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
) -> Inputs:
    """The inputs of `attend_band`."""
    return Inputs(query_BRHC, window_BEC, position_BR, width, sink_H, cos_BRP, sin_BRP, None, None)


def check(inputs: Inputs) -> None:
    """The check of `attend`: that of `check_window`, and ValueError without a bank."""
    given = inputs.bank_BFC is not None and inputs.index_BRK is not None
    require("attend", given, "bank_BFC and index_BRK must be tensors; without a bank, call attend_band")
    check_window("attend", inputs)


def check_window(op: str, inputs: Any) -> None:
    """What every operation that attends to a window asks of its inputs; those of `indexer_kl` have the same names.

    Raises:
        ValueError: in one sentence, if a letter has two sizes, the window is narrower than 1 or shorter than the rows,
            or channels are odd or fewer than are rotated.
    """
    sizes = agree(op, inputs)
    require(op, inputs.width >= 1, f"width = {inputs.width} must be at least 1")
    require(op, sizes["E"] >= sizes["R"], f"{sizes['E']} window entries do not hold the {sizes['R']} rows themselves")
    fits = sizes["C"] % 2 == 0 and 2 * sizes["P"] <= sizes["C"]
    require(op, fits, f"{sizes['C']} channels do not hold {sizes['P']} rotated pairs; C must be even and >= 2P")
