"""The recurrence of `gsm_kernels.delta_rule` by the Triton kernels of flash-linear-attention (extra `fla`), on a GPU.

Its kernels take no flags of documents, but concatenated sequences (`gsm_kernels.sequences`). Only the device knows
their number, so a call of several tokens waits for it; a single token does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..device import absent, at_least_float32, unfit_for_package
from ..sequences import recurrence
from .inputs import Inputs

# Without the delta rule; with it; with the delta rule and decay; with a decay of each channel.
FAMILIES = ("simple_gla", "delta_rule", "gated_delta_rule", "kda")
WIDEST = 256  # largest number of channels of a head

missing = partial(absent, "fla", *(f"fla.ops.{family}" for family in FAMILIES))


def refuses(inputs: Inputs) -> str | None:
    """Return why these kernels cannot take this call, or None."""
    if (refusal := unfit_for_package(*inputs[:3], waits=inputs.query_BTHC.shape[1] > 1)) is not None:
        return refusal
    if inputs.query_BTHC.shape[-1] > WIDEST:
        return f"takes heads of at most {WIDEST} channels, got {inputs.query_BTHC.shape[-1]}"
    if inputs.channel_decay_BTHC is not None and inputs.beta_BTH is None:
        return "has decays of channels only with the delta rule"
    return None


def delta_rule(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.delta_rule`."""
    idle_BT1 = ~inputs.live_BT[..., None]
    key_BTHC = inputs.key_BTHC.masked_fill(idle_BT1[..., None], 0)
    call = {"q": inputs.query_BTHC, "k": key_BTHC, "v": inputs.value_BTHC}
    if inputs.beta_BTH is not None:
        call["beta"] = inputs.beta_BTH.to(inputs.query_BTHC.dtype)
    decay = _decay(inputs)
    if decay is not None:
        call["g"] = decay.masked_fill(idle_BT1 if decay.ndim == 3 else idle_BT1[..., None], 0)
    family = FAMILIES[0 if inputs.beta_BTH is None else 1 if decay is None else decay.ndim - 1]
    documents = inputs.start_BT, inputs.live_BT, inputs.state_BHCC, inputs.scale
    return recurrence(lambda form: _kernel(family, form), call, *documents)


def _decay(inputs: Inputs) -> Tensor | None:
    """Return the total decay: a number per head, [B, T, H], or per channel, [B, T, H, C]."""
    head_BTH, channel_BTHC = inputs.log_decay_BTH, inputs.channel_decay_BTHC
    if head_BTH is None or channel_BTHC is None:
        decay = channel_BTHC if head_BTH is None else head_BTH
        return None if decay is None else at_least_float32(decay)
    return at_least_float32(head_BTH)[..., None] + at_least_float32(channel_BTHC)


def _kernel(family: str, form: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the library's function of a family, in its ``chunk`` or its ``fused_recurrent`` form."""
    return getattr(importlib.import_module(f"fla.ops.{family}"), f"{form}_{family}")
