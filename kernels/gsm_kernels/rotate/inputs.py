"""Checks of the inputs of a rotation."""

from __future__ import annotations

from torch import Tensor


def check(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool = False) -> None:
    """Check the inputs of `rotate`; see `check_angles`."""
    check_angles("rotate", x, cos_BRP, sin_BRP)


def check_angles(op: str, x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor) -> None:
    """Check the inputs of a rotation, for the operation `op`.

    Raises:
        ValueError: if x and the angles differ in B or R, C is odd, or C < 2P.
    """
    if x.ndim not in (3, 4) or cos_BRP.shape != sin_BRP.shape or cos_BRP.shape[:2] != x.shape[:2]:
        shapes = f"{tuple(x.shape)}, {tuple(cos_BRP.shape)} and {tuple(sin_BRP.shape)}"
        raise ValueError(f"{op}: x, cos and sin must have shapes [B,R,(H,)C], [B,R,P] and [B,R,P], got {shapes}")
    if x.shape[-1] % 2 or 2 * cos_BRP.shape[-1] > x.shape[-1]:
        pairs = cos_BRP.shape[-1]
        raise ValueError(f"{op}: channels C must be even and at least 2P, got C = {x.shape[-1]} and P = {pairs}")
