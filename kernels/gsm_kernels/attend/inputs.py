"""The inputs of `attend` and `attend_band`, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..shapes import agree, require

LEARNED = ("query_BRHC", "window_BEC", "sink_H", "bank_BFC", "bias_BRK")  # inputs with a gradient


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.attend`, documented there; `attend_band` has no bank."""

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
        """F, or 0 without a selection."""
        return 0 if self.bank_BFC is None or self.picks == 0 else self.bank_BFC.shape[1]

    @property
    def picks(self) -> int:
        """K, or 0 without a selection."""
        return 0 if self.index_BRK is None else self.index_BRK.shape[2]

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """The inputs named in `LEARNED`."""
        return self.query_BRHC, self.window_BEC, self.sink_H, self.bank_BFC, self.bias_BRK

    def gradients(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return a gradient or None for each input, in its dtype, from the gradients of `learned`."""
        named = zip(LEARNED, self.learned, grads, strict=True)
        by_name = {name: None if x is None or grad is None else grad.to(x.dtype) for name, x, grad in named}
        return tuple([by_name.get(name) for name in self._fields])


def band(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
) -> Inputs:
    """Return the inputs of `attend_band`, without bank and selection."""
    return Inputs(query_BRHC, window_BEC, position_BR, width, sink_H, cos_BRP, sin_BRP, None, None)


def check(inputs: Inputs) -> None:
    """Check the inputs of `attend`.

    Raises:
        ValueError: as `check_window`, or if bank_BFC or index_BRK is None.
    """
    has_bank = inputs.bank_BFC is not None and inputs.index_BRK is not None
    require("attend", has_bank, "bank_BFC and index_BRK must be tensors, got None; without a bank, call attend_band")
    check_window("attend", inputs)


def check_window(op: str, inputs: Any) -> None:
    """Check the inputs of an operation that attends to a window: `attend`, `attend_band` or `indexer_kl`.

    Raises:
        ValueError: if a letter has two sizes, width < 1, E < R, C is odd, or C < 2P.
    """
    sizes = agree(op, inputs)
    require(op, inputs.width >= 1, f"width must be at least 1, got {inputs.width}")
    require(op, sizes["E"] >= sizes["R"], f"window_BEC must have E >= R, got E = {sizes['E']} and R = {sizes['R']}")
    fits = sizes["C"] % 2 == 0 and 2 * sizes["P"] <= sizes["C"]
    require(op, fits, f"channels C must be even and at least 2P, got C = {sizes['C']} and P = {sizes['P']}")
