"""How close an implementation must come to its oracle: one relative norm per tensor, and one table of tolerances."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Largest relative error of an output and of a gradient, and why."""

    forward: float
    backward: float
    reason: str


TOLERANCE: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-9, 1e-9, "the same sums in another order: far above 2e-16 times a thousand terms"),
    torch.float32: Tolerance(2e-6, 1e-5, "6e-8 per rounding, sums of a few hundred terms; more roundings in backward"),
    torch.bfloat16: Tolerance(4e-3, 8e-3, "2e-3 from rounding the result; gradients arrive through a rounded output"),
    torch.float16: Tolerance(5e-4, 1e-3, "bfloat16's reasons with three more bits"),
}


def relative_error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected|| in float64; the absolute norm where nothing is expected."""
    out, expected = out.detach().to(torch.float64), expected.detach().to(torch.float64)
    size = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(out - expected).item() / (size or 1.0)


def assert_close(out: Tensor, expected: Tensor, *, name: str = "output", gradient: bool = False) -> None:
    """Assert that `out` is as close to `expected` (usually float64) as the tolerance of its dtype asks.

    Raises:
        AssertionError: with the name, the error and the tolerance, also where `out` is not finite.
    """
    assert out.shape == expected.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
    assert out.isfinite().all(), f"{name}: not finite"
    tolerance = TOLERANCE[out.dtype]
    limit = tolerance.backward if gradient else tolerance.forward
    error = relative_error(out, expected)
    assert error <= limit, f"{name}: relative error {error:.2e} above {limit:.0e} for {out.dtype} ({tolerance.reason})"
