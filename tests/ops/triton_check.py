"""Running an operation's Triton kernels, on a GPU or in the interpreter, and holding them to the reference in float64.

On a GPU the same calls also run in bfloat16, where the kernels may err at most 1.5 times as much as the eager path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from calls import cast, gradients
from torch import Tensor

from gsm_kernels import Op, listening, using
from gsm_kernels.testing import TOLERANCE, assert_close, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def each_size(sizes: dict[str, dict], *quick: str) -> pytest.MarkDecorator:
    """Parametrises a test over sizes by their names. Those that are not quick are slow in the interpreter."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in (*sizes, *quick)}
    return pytest.mark.parametrize("sizes", [pytest.param(sizes[name], id=name, marks=marks[name]) for name in marks])


def to_device(call: dict) -> dict:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in call.items()}


def with_triton(op: Op) -> Callable:
    """The operation, forced to its Triton kernels, which are then asked whether it was they that ran."""

    def run(**call):
        with using("triton"), listening() as heard:
            result = op(**call)
        assert heard == [(op.name, "triton")]
        return result

    return run


def with_reference(op: Op) -> Callable:
    def run(**call):
        with using("reference"):
            return op(**call)

    return run


def assert_agrees(op: Op, call: dict, dtype: torch.dtype = torch.float32) -> None:
    """Outputs and all gradients of a float64 call equal the reference's, with the kernels' inputs in `dtype`."""
    low = to_device(cast(call, dtype))
    expected = gradients(with_reference(op), cast(low, torch.float64))
    got = gradients(with_triton(op), low)
    for name, out, wanted, is_gradient in _pairs(got, expected):
        assert out.shape == wanted.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(wanted.shape)}"
        if not wanted.is_floating_point():
            assert torch.equal(out, wanted), name
        else:
            assert_close(out, wanted, name=name, gradient=is_gradient)


def assert_as_good_as_eager(op: Op, call: dict, dtype: torch.dtype = torch.bfloat16) -> None:
    """Against float64, the kernels err at most 1.5 times as much as PyTorch's eager arithmetic in `dtype`."""
    low = to_device(cast(call, dtype))
    expected = gradients(with_reference(op), cast(low, torch.float64))
    eager = gradients(with_reference(op), low)
    got = gradients(with_triton(op), low)
    errors = {name: relative_error(out, wanted) for name, out, wanted, _ in _pairs(eager, expected)}
    for name, out, wanted, _ in _pairs(got, expected):
        error = relative_error(out, wanted)
        # Where eager happens to be exact to the last bit, the rounding of the result itself is allowed.
        limit = max(1.5 * errors[name], TOLERANCE[dtype].forward)
        assert error <= limit, f"{name}: error {error:.2e}, eager's is {errors[name]:.2e}"


def _pairs(got: tuple, expected: tuple) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    (outs, grads), (wanted_outs, wanted_grads) = got, expected
    for number, (out, wanted) in enumerate(zip(outs, wanted_outs, strict=True)):
        yield f"output {number}", out, wanted, False
    for argument, wanted in wanted_grads.items():
        assert (grads[argument] is None) == (wanted is None), f"gradient of {argument}"
        if wanted is not None:
            yield f"gradient of {argument}", grads[argument], wanted, True
