"""The inputs of `attend_blocks`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..shapes import agree, require, require_divided_heads


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.attend_blocks`, documented there."""

    query_BRHC: Tensor
    key_BFGC: Tensor
    value_BFGC: Tensor
    first_BR: Tensor
    last_BR: Tensor
    chosen_BRGN: Tensor
    block: int


def check(inputs: Inputs) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes, G does not divide H, or a block has no slot."""
    sizes = agree("attend_blocks", inputs)
    require_divided_heads("attend_blocks", sizes)
    require("attend_blocks", inputs.block >= 1, f"block = {inputs.block} must be at least 1")
