"""Attention over a window and a selection on a CPU: compiled loops."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..native import run, unfit
from .inputs import Inputs

LANES = 32  # heads of neighbouring queries that are computed together; see `loops`
THREAD = 1 << 20  # multiplications that are worth a thread


def refuses(inputs: Inputs) -> str | None:
    """Why this call is not for the loops."""
    query, window, sink, bank, bias = inputs.learned
    return unfit(*(x for x in (query, window, sink, inputs.cos_BRP, inputs.sin_BRP, bank, bias) if x is not None))


def attend(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend` and `gsm_kernels.attend_band`."""
    return _mixed(*inputs)


@functools.cache
def _loops() -> Any:
    return importlib.import_module(".loops", __package__)


def _mixed(query, window, position, width, sink, cos, sin, bank, index, bias) -> Tensor:
    batch, rows, heads, channels = query.shape
    window, bank = _entries(window), None if bank is None else _entries(bank)
    slots, picks = (0, 0) if bank is None or index is None else (bank.shape[1], index.shape[2])
    picks = picks if slots else 0
    queries = max(1, min(LANES // heads, rows))
    out = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    sizes = (rows, window.shape[1], heads, channels, cos.shape[2], width, slots, picks, queries)
    far = (0, 4, 0, 0, 0)
    if picks:
        far = (bank.stride(0), bank.element_size(), bank, index.contiguous(), 0 if bias is None else _wide(bias))
    bank_step, bank_size, bank, index, bias = far
    tensors = (_wide(query), window, bank, index, bias, position.contiguous(), _wide(cos), _wide(sin), _wide(sink), out)
    steps = (window.stride(0), window.element_size(), bank_step, bank_size)
    each = queries * heads * channels * (min(width, window.shape[1]) + picks)
    run(_loops().forward, batch * -(-rows // queries), *sizes, *steps, *tensors, least=-(-THREAD // max(each, 1)))
    return out if query.dtype is torch.float32 else out.to(query.dtype)


def _wide(x: Tensor) -> Tensor:
    """The same in float32, without gaps."""
    return (x if x.dtype is torch.float32 else x.to(torch.float32)).contiguous()


def _entries(x: Tensor) -> Tensor:
    """The same, of dtypes that the loops read, without gaps inside a sequence: of a larger memory's first entries,
    nothing is copied."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.to(torch.float32)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
