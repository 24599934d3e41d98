"""Comparison of an implementation with its oracle: one relative norm per tensor, and one table of tolerances."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Largest relative error of an output and of a gradient, with the reason."""

    forward: float
    backward: float
    reason: str


TOLERANCE: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-9, 1e-9, "the same sums in another order: far above 2e-16 times a thousand terms"),
    torch.float32: Tolerance(2e-6, 1e-5, "6e-8 per rounding, sums of a few hundred terms; more roundings in backward"),
    torch.bfloat16: Tolerance(4e-3, 8e-3, "2e-3 from rounding the result; gradients arrive through a rounded output"),
    torch.float16: Tolerance(5e-4, 1e-3, "bfloat16's reasons with three more bits"),
}
# ex2.approx and div.full have errors of 2 units in the last place, 2^-22. A product of three TF32 products omits the
# remainder of each operand after twice 11 bits, 2^-22 each, and the product of both second halves, another 2^-22: 2^-20
# in total. An exponential multiplies a logit's relative error by the logit, about 8, and a gradient multiplies a few
# such numbers. The error of a single TF32 product, 2^-11, is still detected.
APPROXIMATE = Tolerance(2**-17, 2**-15, "2^-20 of ex2, div and TF32 products, times a logit of 8; more in backward")


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return ||out - expected|| / ||expected|| in float64; the absolute norm if `expected` is zero."""
    out, expected = out.detach().to(torch.float64), expected.detach().to(torch.float64)
    size = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(out - expected).item() / (size or 1.0)


def approximate(x: Tensor) -> bool:
    """Return whether this is float32 on a GPU, where exponentials, quotients and matrix products are less exact."""
    return x.is_cuda and x.dtype == torch.float32


def assert_close(
    out: Tensor, expected: Tensor, *, name: str = "output", gradient: bool = False, eager: Tensor | None = None
) -> None:
    """Assert that `out` is close to `expected` (usually float64), within the tolerance of its dtype.

    Args:
        out: the result.
        expected: the oracle's result.
        name: name of the tensor in the error.
        gradient: whether it is a gradient.
        eager: result of PyTorch's eager arithmetic; if `out` is approximate, 1.5 times its error is allowed, too.

    Raises:
        AssertionError: with the name, the error and the tolerance; also if `out` is not finite.
    """
    assert out.shape == expected.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
    assert out.isfinite().all(), f"{name}: not finite"
    tolerance = APPROXIMATE if approximate(out) else TOLERANCE[out.dtype]
    limit = tolerance.backward if gradient else tolerance.forward
    if eager is not None and approximate(out):
        limit = max(limit, 1.5 * relative_error(eager, expected))
    error = relative_error(out, expected)
    assert error <= limit, f"{name}: relative error {error:.2e} above {limit:.1e} for {out.dtype} ({tolerance.reason})"
