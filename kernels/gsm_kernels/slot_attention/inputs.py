"""The inputs of `slot_attention`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..shapes import agree, require


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.slot_attention`, documented there."""

    query_BTHC: Tensor
    key_BTHC: Tensor
    value_BTHC: Tensor
    write_BTHM: Tensor
    log_decay_BTHM: Tensor
    start_BT: Tensor
    live_BT: Tensor
    state_BHMU: Tensor
    scale: float = 1.0


def check(inputs: Inputs) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes, U is not 2 C, or T is 0."""
    sizes = agree("slot_attention", inputs)
    require("slot_attention", sizes["T"] >= 1, "there must be at least one token, got T = 0")
    key_and_value = f"U must be 2 C, keys and values side by side, got {sizes['U']} for C = {sizes['C']}"
    require("slot_attention", sizes["U"] == 2 * sizes["C"], key_and_value)
