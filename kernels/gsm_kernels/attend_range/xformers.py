"""xformers' memory-efficient attention with its built-in masks. xformers is imported only when needed.

xformers describes masks by numbers on the host. With `whole`, the mask is known. Otherwise the lengths of packed
documents are computed from the ranges, which waits for the device; this happens only if R = F, so not in decoding.
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
    """Return why xformers cannot run on this machine, or None."""
    return "cannot be traced into a graph" if torch.compiler.is_compiling() else _missing()


@functools.cache
def _missing() -> str | None:
    with _quiet():
        reason = absent("xformers", "xformers._cpp_lib", "xformers.ops.fmha")
    if reason is not None or getattr(importlib.import_module("xformers._cpp_lib"), "_built_with_cuda", False):
        return reason
    return "xformers' CUDA extension cannot be loaded by this PyTorch"


def refuses(inputs: Inputs) -> str | None:
    """Return why xformers cannot take this call, or None. The ranges are read last, because that is slow."""
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
    # `expand` shares keys and values among the heads of a group without a copy.
    shared = (inputs.key_BFGC, inputs.value_BFGC)
    key, value = (x[:, :, :, None].expand(-1, -1, -1, shape[2] // groups, -1) for x in shared)
    if not inputs.whole:  # packed documents: xformers takes all sequences of the batch as one
        query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
    attention = importlib.import_module("xformers.ops.fmha").memory_efficient_attention
    return attention(query, key, value, attn_bias=mask).reshape(shape)


def mask_of(inputs: Inputs) -> Any:
    """Return xformers' mask for these ranges, or None if it has no such mask."""
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
    """Return the lengths of all documents of the batch in order, on the host.

    The result is None unless every row sees exactly the slots of its document up to its own, at most `width`. So it is
    None if there is padding, which sees no slot.
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
    """Suppress what xformers logs at its first import if its extension does not load."""
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
