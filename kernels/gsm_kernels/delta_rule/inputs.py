"""The inputs of `delta_rule`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..shapes import agree, require


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.delta_rule`, documented there."""

    query_BTHC: Tensor
    key_BTHC: Tensor
    value_BTHC: Tensor
    beta_BTH: Tensor | None
    log_decay_BTH: Tensor | None
    start_BT: Tensor
    live_BT: Tensor
    state_BHCC: Tensor
    scale: float = 1.0
    channel_decay_BTHC: Tensor | None = None


def check(inputs: Inputs) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes, or T is 0."""
    sizes = agree("delta_rule", inputs)
    require("delta_rule", sizes["T"] >= 1, "there must be at least one token, got T = 0")
