"""Run one implementation of an operation, and hold it to the reference in float64.

Triton's kernels run on a GPU or in the interpreter. On a GPU the same calls also run in bfloat16, where the kernels may
err at most 1.5 times as much as the eager path. So they may in float32, which is approximate there
(`closeness`); the interpreter's is held to its last bits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import closeness
import pytest
import torch
from calls import cast, gradients
from closeness import TOLERANCE, assert_close, relative_error
from torch import Tensor

from gsm_kernels import Op, device, launch, listening, tiles, using

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ASSEMBLERS = ("ptxas", device.ASSEMBLER)  # of CUDA 12.8 and 13.1, in Triton's wheel


def assembled_by(assembler: str, folder: Path) -> dict[str, str]:
    """Return the environment of a process whose kernels one of Triton's assemblers makes; they are kept in a folder."""
    binaries = Path(pytest.importorskip("triton").__file__).parent / "backends" / "nvidia" / "bin"
    return {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_PTXAS_PATH": str(binaries / assembler)}


def to_device(call: dict) -> dict:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in call.items()}


def run_by(implementation: str, op: Op) -> Callable:
    """The operation, forced to an implementation. It is an error if another one runs."""

    def run(**call):
        if next((impl for impl in op.fast if impl.name == implementation and impl.narrow), None):
            with listening() as heard:  # it cannot be forced, and takes the calls that it is for
                result = op(**call)
        else:
            with using(implementation), listening() as heard:
                result = op(**call)
        assert heard == [(op.name, implementation)]
        return READ.get(op.name, lambda result: result)(result)

    return run


# A loss near zero is the difference of cross-entropy and entropy, about a nat each, with their roundings: below a nat
# the limit is an absolute one. The recall of nothing is NaN.
READ = {"indexer_kl": lambda result: (1 + result[0], result[1].float().nan_to_num(-1.0))}


def with_triton(op: Op) -> Callable:
    return run_by("triton", op)


def with_reference(op: Op) -> Callable:
    return run_by("reference", op)


@contextlib.contextmanager
def in_case(name: object) -> Iterator[None]:
    """An error in the block names the case."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {name}")
        raise


class Launch(NamedTuple):
    """One launch: the name of its kernel, and what the kernel was given."""

    kernel: str
    args: tuple
    options: dict[str, Any]


def launches_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return a list to which each later launch of a module is added."""
    seen, plain = list[Launch](), module.launch

    def spy(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if launch._hook() is None:
            seen.append(Launch(kernel.__name__, args, options))
        plain(kernel, grid, *args, **options)

    for place in (module, tiles):
        monkeypatch.setattr(place, "launch", spy)
    return seen


def assert_agrees(op: Op, call: dict, dtype: torch.dtype = torch.float32, implementation: str = "triton") -> None:
    """Outputs and all gradients of a float64 call equal the reference's, with the inputs in `dtype`."""
    assert_same(run_by(implementation, op), with_reference(op), to_device(cast(call, dtype)))


def assert_same(fast: Callable, slow: Callable, low: dict) -> dict[str, Tensor]:
    """Outputs and all gradients of `fast` equal those of `slow`, which gets the same call in float64. Returns the
    gradients, None where nothing flows."""
    expected = gradients(slow, cast(low, torch.float64))
    judged_by_eager = any(isinstance(x, Tensor) and closeness.approximate(x) for x in low.values())
    eager = gradients(slow, low) if judged_by_eager else ([None] * len(expected[0]), dict.fromkeys(expected[1]))
    got = gradients(fast, low)
    by_eager = [*eager[0], *(eager[1][name] for name, grad in expected[1].items() if grad is not None)]
    for (name, out, wanted, is_gradient), other in zip(pairs(got, expected), by_eager, strict=True):
        assert_one(name, out, wanted, is_gradient, other)
    return got[1]


def assert_near(first: tuple, second: tuple) -> None:
    """Results of two ways agree."""
    for name, out, wanted, is_gradient in pairs(first, second):
        assert_one(name, out, wanted, is_gradient)


def assert_one(name: str, out: Tensor, wanted: Tensor, is_gradient: bool, eager: Tensor | None = None) -> None:
    assert out.shape == wanted.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(wanted.shape)}"
    if not wanted.is_floating_point():
        assert out.dtype == wanted.dtype and torch.equal(out, wanted), name
    elif out.dtype != torch.float64 or not (out - wanted).norm() <= TOLERANCE[torch.float64].forward:
        assert_close(out, wanted, name=name, gradient=is_gradient, eager=eager)


def assert_as_good_as_eager(op: Op, call: dict, dtype: torch.dtype = torch.bfloat16) -> None:
    """Against float64, the kernels err at most 1.5 times as much as PyTorch's eager arithmetic in `dtype`."""
    low = to_device(cast(call, dtype))
    expected = gradients(with_reference(op), cast(low, torch.float64))
    eager = gradients(with_reference(op), low)
    got = gradients(with_triton(op), low)
    errors = {name: relative_error(out, wanted) for name, out, wanted, _ in pairs(eager, expected)}
    for name, out, wanted, _ in pairs(got, expected):
        error = relative_error(out, wanted)
        # Where eager happens to be exact to the last bit, the rounding of the result itself is allowed.
        limit = max(1.5 * errors[name], TOLERANCE[dtype].forward)
        assert error <= limit, f"{name}: error {error:.2e}, eager's is {errors[name]:.2e}"


def pairs(got: tuple, expected: tuple) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    """Outputs and gradients of two results of `gradients`, with their names, and whether they are gradients."""
    (outs, grads), (wanted_outs, wanted_grads) = got, expected
    for number, (out, wanted) in enumerate(zip(outs, wanted_outs, strict=True)):
        yield f"output {number}", out, wanted, False
    for argument, wanted in wanted_grads.items():
        if wanted is None:
            assert grads[argument] is None or not grads[argument].any(), f"gradient of {argument}"
        else:
            assert grads[argument] is not None, f"gradient of {argument}"
            yield f"gradient of {argument}", grads[argument], wanted, True
