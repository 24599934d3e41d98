"""`gsm_kernels.attend_band` by FlashAttention 4 (package flash-attn-4), on a GPU that its kernels are made for.

It has no rotation, so that queries and outputs are rotated outside of it, with one more rounding each. It takes no
positions, but concatenated sequences (`gsm_kernels.sequences`); only the device knows their number, so a call waits for
it. FlashAttention 3 has no sink.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable

import torch
from torch import Tensor

from ..device import absent, unfit_for_package, version
from ..rotate.reference import rotate
from ..sequences import offsets
from .inputs import Inputs

OLDEST = 26  # beta of 4.0.0: the first with a gradient for the sink on Hopper
CHANNELS = (64, 96, 128)


def missing() -> str | None:
    """Return why it cannot run on this machine, or None."""
    return absent("flash_attn", "flash_attn.cute", with_triton=False) or _too_old()


@functools.cache
def _too_old() -> str | None:
    """Return why the installed release, or this GPU, has no gradient for a sink, or None."""
    release = version("flash-attn-4")
    if release is None:
        return "flash-attn-4 is not installed"
    beta = re.fullmatch(r"4\.0\.0b(\d+)", release)
    new_enough = int(beta[1]) >= OLDEST if beta else re.fullmatch(r"\d+(\.\d+)*", release)
    if not new_enough:
        return f"flash-attn-4 {release} may have no gradient for sinks. Use 4.0.0b{OLDEST} or a later release"
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "flash-attn-4 has gradients for sinks on Hopper and Blackwell GPUs only"
    return None


def refuses(inputs: Inputs) -> str | None:
    """Return why these kernels cannot take this call, or None."""
    if (refusal := unfit_for_package(inputs.query_BRHC, inputs.window_BEC, waits=True)) is not None:
        return refusal
    if inputs.query_BRHC.shape[3] not in CHANNELS:
        return f"made for 64, 96 or 128 channels, got {inputs.query_BRHC.shape[3]}"
    same = inputs.query_BRHC.shape[1] == inputs.window_BEC.shape[1]
    return None if same else "needs the rows to be the entries: it has no memory"


def attend_band(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_band`."""
    batch, rows, _, channels = inputs.query_BRHC.shape
    angles = inputs.cos_BRP, inputs.sin_BRP
    # A row of padding becomes a sequence of its own; its output is 0, and so are its gradients.
    bounds_N = offsets(inputs.position_BR <= 0).int()
    entry = inputs.window_BEC.flatten(0, 1)[:, None]
    sequences = {"cu_seqlens_q": bounds_N, "cu_seqlens_k": bounds_N, "max_seqlen_q": rows, "max_seqlen_k": rows}
    options = {"softmax_scale": channels**-0.5, "causal": True, "window_size": (inputs.width - 1, 0)}
    query = rotate(inputs.query_BRHC, *angles).flatten(0, 1)
    out, _ = _kernel()(query, entry, entry, **sequences, **options, learnable_sink=inputs.sink_H, deterministic=True)
    out_BRHC = out.unflatten(0, (batch, rows)).masked_fill((inputs.position_BR < 0)[..., None, None], 0)
    return rotate(out_BRHC, *angles, inverse=True)


def _kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the library's function."""
    return importlib.import_module("flash_attn.cute").flash_attn_varlen_func
