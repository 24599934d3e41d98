"""The recurrence of `gsm_kernels.slot_attention` by the kernels of flash-linear-attention (extra `fla`), on a GPU.

Its kernels take no flags of documents, but concatenated sequences (`gsm_kernels.sequences`). Only the device knows
their number, so a call of several tokens waits for it; a single token does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..device import absent, at_least_float32, unfit_for_package
from ..sequences import recurrence
from .inputs import Inputs

NARROWEST, WIDEST = 16, 256  # channels of a head, and its slots

missing = partial(absent, "fla", "fla.ops.gsa")


def refuses(inputs: Inputs) -> str | None:
    """Return why these kernels cannot take this call, or None."""
    if (refusal := unfit_for_package(*inputs[:3], waits=inputs.query_BTHC.shape[1] > 1)) is not None:
        return refusal
    channels, slots = inputs.query_BTHC.shape[-1], inputs.write_BTHM.shape[-1]
    if min(channels, slots) < NARROWEST or max(channels, slots) > WIDEST:
        return f"takes heads of {NARROWEST} to {WIDEST} channels and slots, got {channels} and {slots}"
    return None


def slot_attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.slot_attention`."""
    idle_BT11 = ~inputs.live_BT[..., None, None]
    call = {
        **{"q": inputs.query_BTHC, "k": inputs.key_BTHC, "v": inputs.value_BTHC},
        "s": inputs.write_BTHM.to(inputs.query_BTHC.dtype).masked_fill(idle_BT11, 0),
        "g": at_least_float32(inputs.log_decay_BTHM).masked_fill(idle_BT11, 0),
    }
    documents = inputs.start_BT, inputs.live_BT, inputs.state_BHMU, inputs.scale
    return recurrence(lambda form: partial(_side_by_side, _kernel(form)), call, *documents)


def _kernel(form: str) -> Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Return the library's function in its ``chunk`` or its ``fused_recurrent`` form."""
    return getattr(importlib.import_module("fla.ops.gsa"), f"{form}_gsa")


def _side_by_side(
    kernel: Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]], *, initial_state: Tensor, **call
) -> tuple[Tensor, Tensor]:
    """Run a kernel that takes keys [C, M] and values [M, C] of slots as two tensors."""
    keys_NHMC, values_NHMC = initial_state.chunk(2, dim=-1)
    out, (keys_NHCM, values_NHMC) = kernel(**call, initial_state=(keys_NHMC.mT.contiguous(), values_NHMC.contiguous()))
    return out, torch.cat((keys_NHCM.mT, values_NHMC), dim=-1)
