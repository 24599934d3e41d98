"""Attention over a band as Triton kernels: those of `attend` with no selection to read, and larger tiles."""

from __future__ import annotations

from torch import Tensor

from ..attend import triton


def refuses(
    query_BRHC: Tensor,
    entry_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
) -> str | None:
    """Why this call is not for the kernels."""
    return triton.refuses(query_BRHC, entry_BEC, position_BR, width, sink_H, cos_BRP, sin_BRP)


def attend_band(
    query_BRHC: Tensor,
    entry_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
) -> Tensor:
    """See `gsm_kernels.attend_band`."""
    return triton.attend(query_BRHC, entry_BEC, position_BR, width, sink_H, cos_BRP, sin_BRP)
