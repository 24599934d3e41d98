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
    return unfit(*[x for x in inputs.learned if x is not None])


def attend(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend` and `gsm_kernels.attend_band`."""
    return _mixed(*inputs)


@functools.cache
def _loops() -> Any:
    return importlib.import_module(".loops", __package__)


def _mixed(query, window, position, width, sink, cos, sin, bank, index, bias) -> Tensor:
    batch, rows, heads, channels = query.shape
    window, entries, picks = _entries(window), window.shape[1], 0
    queries = max(1, min(LANES // heads, rows))
    out = torch.empty((batch, rows, heads, channels))
    slots = bank_step = bank_size = 0
    if bank is not None and index.shape[2] and bank.shape[1]:
        bank, index, slots, picks = _entries(bank), index.contiguous(), bank.shape[1], index.shape[2]
        bank_step, bank_size = bank.stride(0), bank.element_size()
    far = (bank, index, 0 if bias is None else _wide(bias)) if picks else (0, 0, 0)
    sizes = (rows, entries, heads, channels, cos.shape[2], width, slots, picks, queries)
    steps = (window.stride(0), window.element_size(), bank_step, bank_size)
    tensors = (_wide(query), window, *far, position.contiguous(), _wide(cos), _wide(sin), _wide(sink), out)
    each = queries * heads * channels * (min(width, entries) + picks)
    run(_loops().forward, batch * -(-rows // queries), *sizes, *steps, *tensors, least=-(-THREAD // max(each, 1)))
    return out if query.dtype is torch.float32 else out.to(query.dtype)


def _wide(x: Tensor) -> Tensor:
    """The same in float32, without gaps."""
    return (x if x.dtype is torch.float32 else x.to(torch.float32)).contiguous()


def _entries(x: Tensor) -> Tensor:
    """The same, of dtypes that the loops read, without gaps inside a sequence: of a larger memory's first entries,
    nothing is copied."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.to(torch.float32)
    _, step, one = x.stride()
    return x if one == 1 and step == x.shape[2] else x.contiguous()
