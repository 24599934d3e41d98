"""xformers' memory-efficient attention with its built-in masks; imported only when needed.

Its masks are on the host. The guarantee `whole` selects one without a check. Packed documents are read from the ranges,
which waits for the device; this happens only if the rows are all slots, and so never with a memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..device import absent, unfit_for_package
from .reference import Inputs


def missing() -> str | None:
    """Return why it cannot run on this machine, or None."""
    return "cannot be traced into a graph" if torch.compiler.is_compiling() else _missing()


@functools.cache
def _missing() -> str | None:
    with _quiet():
        reason = absent("xformers", "xformers._cpp_lib", "xformers.ops.fmha")
    if reason is not None or getattr(importlib.import_module("xformers._cpp_lib"), "_built_with_cuda", False):
        return reason
    return "xformers' CUDA extension cannot be loaded by this PyTorch"


def refuses(inputs: Inputs) -> str | None:
    """Return why it cannot take this call, or None; values of ranges are checked last, because reading them is slow."""
    if (refusal := unfit_for_package(*inputs[:3], waits=not inputs.whole)) is not None:
        return refusal
    channels = inputs.query_BRHC.shape[-1]
    if channels % 8 or channels > 256:
        return f"needs a multiple of 8 channels, at most 256, got {channels}"
    if mask_of(inputs) is None:
        return "xformers has no mask for these ranges: they are neither one causal sequence nor packed documents"
    return None


def attend_range(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_range`."""
    mask, shape, groups = mask_of(inputs), inputs.query_BRHC.shape, inputs.key_BFGC.shape[2]
    query = inputs.query_BRHC.unflatten(2, (groups, -1))
    # Heads of a group share keys and values without a copy: their stride is 0.
    shared = (inputs.key_BFGC, inputs.value_BFGC)
    key, value = (x[:, :, :, None].expand(-1, -1, -1, shape[2] // groups, -1) for x in shared)
    if not inputs.whole:  # packed documents: all sequences of the batch become one row
        query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
    attention = importlib.import_module("xformers.ops.fmha").memory_efficient_attention
    return attention(query, key, value, attn_bias=mask).reshape(shape)


def mask_of(inputs: Inputs) -> Any:
    """Return the mask of xformers for these ranges, or None if there is none."""
    with _quiet():
        masks = importlib.import_module("xformers.ops.fmha.attn_bias")
    width = inputs.width
    if inputs.whole:
        return (
            masks.LowerTriangularFromBottomRightMask()
            if width is None
            else masks.LocalAttentionFromBottomRightMask(window_left=width - 1, window_right=0)
        )
    if inputs.first_BR.shape[1] != inputs.key_BFGC.shape[1]:
        return None
    lengths = document_lengths(inputs.first_BR, inputs.last_BR, width)
    if lengths is None:
        return None
    mask = masks.BlockDiagonalCausalMask.from_seqlens(lengths)
    return mask if width is None else mask.make_local_attention(width)


def document_lengths(first_BR: Tensor, last_BR: Tensor, width: int | None) -> list[int] | None:
    """Return the lengths of all documents in order; None unless every row sees its document's slots up to its own.

    Padding sees nothing, so it also returns None.
    """
    batch, rows = first_BR.shape
    place_R = torch.arange(rows, device=first_BR.device)
    begins_BR = last_BR - first_BR == 1  # the first row of a document sees itself alone
    start_BR = torch.where(begins_BR, place_R, 0).cummax(1).values
    expected_BR = start_BR if width is None else torch.maximum(start_BR, place_R - width + 1)
    right = (first_BR == expected_BR).all() & (last_BR == place_R + 1).all()
    if not right.item():
        return None
    begins = [*begins_BR.flatten().nonzero().flatten().tolist(), batch * rows]
    return [end - begin for begin, end in pairwise(begins)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the lines that xformers prints at its first import if its extension does not load."""
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
