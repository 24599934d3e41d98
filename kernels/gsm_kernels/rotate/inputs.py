"""What fits together in a rotation."""

from __future__ import annotations

from torch import Tensor


def check(x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, inverse: bool = False) -> None:
    """Raise ValueError, in one sentence, if the angles are not those of the rows of x, or more than its pairs."""
    check_angles("rotate", x, cos_BRP, sin_BRP)


def check_angles(op: str, x: Tensor, cos_BRP: Tensor, sin_BRP: Tensor) -> None:
    """The same, for an operation of another name."""
    if x.ndim not in (3, 4) or cos_BRP.shape != sin_BRP.shape or cos_BRP.shape[:2] != x.shape[:2]:
        shapes = f"{tuple(x.shape)}, {tuple(cos_BRP.shape)} and {tuple(sin_BRP.shape)}"
        raise ValueError(f"{op}: x, cos and sin have shapes {shapes}. Use [B,R,(H,)C], [B,R,P] and [B,R,P]")
    if x.shape[-1] % 2 or 2 * cos_BRP.shape[-1] > x.shape[-1]:
        pairs = cos_BRP.shape[-1]
        raise ValueError(f"{op}: {x.shape[-1]} channels do not hold {pairs} pairs; C must be even and >= 2P")
