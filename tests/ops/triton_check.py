"""Running an operation's Triton kernels, on a GPU or in the interpreter, and holding them to the reference in float64.

On a GPU the same calls also run in bfloat16, where the kernels may err at most 1.5 times as much as the eager path. So
they may in float32, which is approximate there (`gsm_kernels.testing`); the interpreter's is held to its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from calls import cast, gradients
from torch import Tensor

from gsm_kernels import Op, launch, listening, testing, using
from gsm_kernels.testing import TOLERANCE, assert_close, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def each_size(sizes: dict[str, dict], *quick: str) -> pytest.MarkDecorator:
    """Parametrises a test over sizes by their names. Those that are not quick are slow in the interpreter."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in (*sizes, *quick)}
    return pytest.mark.parametrize("sizes", [pytest.param(sizes[name], id=name, marks=marks[name]) for name in marks])


def to_device(call: dict) -> dict:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in call.items()}


def ordinary(number: int) -> int:
    """The number, or the one above a 1 or a multiple of 16: for those, Triton compiles a kernel of their own."""
    return number + 1 if number == 1 or number % 16 == 0 else number


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


class Launch(NamedTuple):
    """One launch: the name of its kernel, and what the kernel was given."""

    kernel: str
    args: tuple
    options: dict[str, Any]


def launches_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What a module launches from now on, as it grows. A backward that is only built, ahead of its forward, is left
    out; see `build_ahead`."""
    seen, plain = list[Launch](), module.launch

    def spy(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if launch._hook() is None:
            seen.append(Launch(kernel.__name__, args, options))
        plain(kernel, grid, *args, **options)

    monkeypatch.setattr(module, "launch", spy)
    build_ahead(module, monkeypatch)
    return seen


def build_ahead(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which has nothing to build, a module goes through its backward ahead of its first forward as
    on a GPU, without launching anything: what a test counts there, it counts here."""
    built = set()

    def build_once(key: Any, run: Callable[[], Any]) -> None:
        if key not in built and launch._hook() is None:
            built.add(key)
            with launch.launching(lambda *call: None):
                run()

    if launch.INTERPRETED and hasattr(module, "build_once"):
        monkeypatch.setattr(module, "build_once", build_once)


def assert_agrees(op: Op, call: dict, dtype: torch.dtype = torch.float32) -> None:
    """Outputs and all gradients of a float64 call equal the reference's, with the kernels' inputs in `dtype`."""
    assert_same(with_triton(op), with_reference(op), to_device(cast(call, dtype)))


def assert_same(fast: Callable, slow: Callable, low: dict) -> dict[str, Tensor]:
    """Outputs and all gradients of `fast` equal those of `slow`, which gets the same call in float64. Returns the
    gradients, None where nothing flows."""
    expected = gradients(slow, cast(low, torch.float64))
    judged_by_eager = any(isinstance(x, Tensor) and testing.approximate(x) for x in low.values())
    eager = gradients(slow, low) if judged_by_eager else ([None] * len(expected[0]), dict.fromkeys(expected[1]))
    got = gradients(fast, low)
    by_eager = [*eager[0], *(eager[1][name] for name, grad in expected[1].items() if grad is not None)]
    for (name, out, wanted, is_gradient), other in zip(_pairs(got, expected), by_eager, strict=True):
        assert out.shape == wanted.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(wanted.shape)}"
        if not wanted.is_floating_point():
            assert torch.equal(out, wanted), name
        else:
            assert_close(out, wanted, name=name, gradient=is_gradient, eager=other)
    return got[1]


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
