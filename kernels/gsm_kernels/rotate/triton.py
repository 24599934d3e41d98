"""Rotation in one Triton kernel, which reads and writes each element once. The gradient is the inverse rotation.

The reference needs five kernels, for a float32 copy, complex angles, the product, and the dtype of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, launch, power_of_two, unfit
from ..register import register
from .reference import differentiable

WIDEST = 8192  # largest C: a program holds a row in registers


def refuses(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool = False) -> str | None:
    """Return why the kernel cannot take this call, or None."""
    if x.shape[-1] > WIDEST:
        return f"holds a row in registers, at most {WIDEST} numbers, got {x.shape[-1]}"
    return unfit(x, cos_BRP, sin_BRP)


def tile(width: int) -> tuple[int, dict[str, int]]:
    """Return the rows of a tile, and its launch options: 16 elements per thread, and several rows if D is small."""
    columns = power_of_two(width)
    rows = max(1, 2048 // columns)
    return rows, {"D": width, "ROWS": rows, "BLOCK": columns, "num_warps": min(16, rows * columns // 512)}


def angles_of(
    x: Tensor, cos_BRP: Tensor | None, sin_BRP: Tensor | None
) -> tuple[Tensor | None, Tensor | None, dict[str, int]]:
    """Return contiguous cosine and sine, and the constants HEADS (rows per angle) and PAIRS; PAIRS = 0 for None."""
    if cos_BRP is None or sin_BRP is None:
        return None, None, {"HEADS": 1, "PAIRS": 0}
    sizes = {"HEADS": x.shape[2] if x.ndim == 4 else 1, "PAIRS": cos_BRP.shape[2]}
    return cos_BRP.contiguous(), sin_BRP.contiguous(), sizes


def _forward(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool) -> Tensor:
    from .kernels import rotate

    x, (cos, sin, turn), (rows, sizes) = x.contiguous(), angles_of(x, cos_BRP, sin_BRP), tile(x.shape[-1])
    out, count = torch.empty_like(x), x.shape[:-1].numel()
    launch(rotate, (cdiv(count, rows),), x, cos, sin, out, count, SIGN=-1 if inverse else 1, **turn, **sizes)
    return out


_operator = register("rotate", _forward)


def rotate(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool = False) -> Tensor:
    """See `gsm_kernels.rotate`."""
    return differentiable(_operator, x, cos_BRP, sin_BRP, inverse)
