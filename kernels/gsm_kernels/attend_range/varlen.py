"""PyTorch's FlashAttention for concatenated sequences, on a GPU: documents and windows without a mask.

The guarantee `whole` selects the sequences without a look at the ranges. Packed documents are read from the ranges,
which waits for the device; this happens only if the rows are all slots, and so never with a memory.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..device import no_nvidia_gpu, unfit_for_package
from ..sequences import offsets
from .inputs import Inputs


def missing() -> str | None:
    """Return why it cannot run on this machine, or None."""
    return "cannot be traced into a graph" if torch.compiler.is_compiling() else _missing()


@cache
def _missing() -> str | None:
    if (refusal := no_nvidia_gpu()) is not None:
        return refusal
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or newer"
    try:
        known = "window_size" in inspect.signature(_kernel()).parameters
    except ImportError:
        known = False
    return None if known else f"has no windows in PyTorch {torch.__version__}. Use PyTorch 2.13 or later"


def refuses(inputs: Inputs) -> str | None:
    """Return why it cannot take this call, or None; values of ranges are checked last, because reading them is slow."""
    refusal = unfit_for_package(*inputs[:3], waits=not inputs.whole)
    if refusal is not None:
        return refusal
    (rows, channels), slots = inputs.query_BRHC.shape[1::2], inputs.key_BFGC.shape[1]
    if channels % 8 or channels > 256:
        return f"needs a multiple of 8 channels, at most 256, got {channels}"
    if rows == 0:
        return "needs at least one row"
    if not inputs.whole and (rows != slots or not are_documents(inputs)):
        return "needs ranges that are one causal sequence or packed documents"
    return None


def attend_range(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_range`."""
    (batch, rows), slots = inputs.query_BRHC.shape[:2], inputs.key_BFGC.shape[1]
    if inputs.whole:
        sequence = torch.arange(batch + 1, dtype=torch.int32, device=inputs.query_BRHC.device)
        of_rows, of_slots = sequence * rows, sequence * slots
    else:
        of_rows = of_slots = offsets(_begins(inputs)).int()
    query, key, value = (x.flatten(0, 1) for x in inputs[:3])
    left = -1 if inputs.width is None else inputs.width - 1
    out = _kernel()(query, key, value, of_rows, of_slots, rows, slots, window_size=(left, 0), enable_gqa=True)
    out_BRHC = out.unflatten(0, (batch, rows))
    return out_BRHC if inputs.whole else out_BRHC.masked_fill((inputs.last_BR <= inputs.first_BR)[..., None, None], 0)


def are_documents(inputs: Inputs) -> bool:
    """Return whether every row sees its document's slots up to its own, or nothing. The call waits for the device."""
    rows = inputs.first_BR.shape[1]
    place_R = torch.arange(rows, device=inputs.first_BR.device)
    first_BR = torch.where(_begins(inputs), place_R, 0).cummax(1).values
    if inputs.width is not None:
        first_BR = torch.maximum(first_BR, place_R - inputs.width + 1)
    right_BR = (inputs.first_BR == first_BR) & (inputs.last_BR == place_R + 1)
    return bool((right_BR | (inputs.last_BR <= inputs.first_BR)).all())


def _begins(inputs: Inputs) -> Tensor:
    """Return the flags of rows that see themselves alone, as the first of a document does, or nothing."""
    return inputs.last_BR - inputs.first_BR <= 1


def _kernel() -> Callable[..., Tensor]:
    """Return PyTorch's function, which PyTorch 2.9 does not have."""
    return importlib.import_module("torch.nn.attention.varlen").varlen_attn
