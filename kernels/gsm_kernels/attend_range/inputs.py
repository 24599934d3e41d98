"""The inputs of `attend_range`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..shapes import agree, require, require_divided_heads


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.attend_range`, documented there."""

    query_BRHC: Tensor
    key_BFGC: Tensor
    value_BFGC: Tensor
    first_BR: Tensor
    last_BR: Tensor
    width: int | None = None
    whole: bool = False


def check(inputs: Inputs) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes, G does not divide H, the window is narrower than 1,
    or the rows do not fit into the slots that they stand at."""
    sizes, width = agree("attend_range", inputs), inputs.width
    require_divided_heads("attend_range", sizes)
    require("attend_range", width is None or width >= 1, f"width = {width} must be at least 1")
    fits = width is None and not inputs.whole or sizes["F"] >= sizes["R"]
    require("attend_range", fits, f"{sizes['F']} slots do not hold the {sizes['R']} rows themselves")
