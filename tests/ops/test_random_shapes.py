"""The tests with random shapes have a GPU compile a few kernels: a compilation takes seconds, and a test has minutes.

Triton compiles a kernel for its compile-time constants, for the dtypes of its arguments, and once more for integers
that are 1, and for integers and addresses that are multiples of 16. What it would compile is counted here, without a
GPU, with the key that Triton itself goes by.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import test_triton_attend as attention
import test_triton_indexer
import test_triton_indexer_kl
import test_triton_linear_cross_entropy as losses
import test_triton_mhc
import test_triton_pool_groups
import test_triton_rms_norm
import torch
from calls import cast, gradients
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from gsm_kernels import (
    Op,
    index_top_k,
    indexer_kl,
    launch,
    linear_cross_entropy,
    mhc_boundary,
    pool_groups,
    rms_norm,
    using,
)

MOST_CONSTANTS = 12  # sets of compile-time constants, of a kernel in a test


def of(op: Op, calls: Callable[..., Iterator[dict]], *arguments: bool) -> Callable[[], Iterator[tuple[Op, dict]]]:
    """The calls of an operation, as pairs."""
    return lambda: ((op, call) for call in calls(*arguments))


RANDOM = {  # by test: its calls, their dtype, and how many kernels it may have compiled
    "rms_norm": (of(rms_norm, test_triton_rms_norm.random_calls), torch.float32, 24),
    "pool_groups": (of(pool_groups, test_triton_pool_groups.random_calls), torch.float32, 24),
    "linear_cross_entropy": (of(linear_cross_entropy, losses.random_calls), torch.float32, 12),
    "indexer": (of(index_top_k, test_triton_indexer.random_calls), torch.bfloat16, 32),
    "mhc": (of(mhc_boundary, test_triton_mhc.random_calls), torch.bfloat16, 44),
    "indexer_kl, visible": (of(indexer_kl, test_triton_indexer_kl.random_calls, True), torch.float32, 40),
    "indexer_kl, selected": (of(indexer_kl, test_triton_indexer_kl.random_calls, False), torch.float32, 28),
} | {
    f"attend, {heads} heads of {channels}": (partial(attention.random_calls, heads, channels), torch.bfloat16, 16)
    for heads in (4, 32)
    for channels in (32, 128)
}


@cache
def binder(kernel) -> tuple[list[str], Callable]:
    """The names of a kernel's compile-time constants, and Triton's way from arguments to what it compiles for."""
    jitted = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)  # interpreted
    backend = make_backend(GPUTarget("cuda", 90, 32))
    names = [parameter.name for parameter in jitted.params if parameter.is_constexpr]
    return names, create_function_from_signature(jitted.signature, jitted.params, backend)


@pytest.fixture
def compiled(monkeypatch) -> Iterator[dict[str, set[tuple[str, str]]]]:
    """By kernel, the constants and all that the calls of the test would have it compiled for. Nothing is launched."""
    found, built = defaultdict(set), set()

    def instead(kernel, grid: tuple, args: tuple, options: dict) -> None:
        names, bind = binder(kernel)
        given, specialization, rest = bind(*args, **options)
        constants = f"{[given[name] for name in names]} {rest}"
        found[f"{kernel.fn.__module__}.{kernel.__name__}"].add((constants, f"{specialization} {rest}"))

    def build_once(key, run: Callable) -> None:
        """On a GPU a backward is compiled ahead of its forward, with other tensors than those of its launch."""
        if key not in built:
            built.add(key)
            run()

    for module in [module for name, module in sys.modules.items() if name.startswith("gsm_kernels.")]:
        if hasattr(module, "build_once"):
            monkeypatch.setattr(module, "build_once", build_once)
    monkeypatch.setattr(launch, "INTERPRETED", False)  # which refuses bfloat16
    with launch.launching(instead), using("triton"):
        yield found


def fresh(call: dict, dtype: torch.dtype) -> dict:
    """The call as a GPU gets it: each tensor in memory of its own, which begins at a multiple of 16."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in cast(call, dtype).items()}


@pytest.mark.parametrize(("calls", "dtype", "most"), RANDOM.values(), ids=RANDOM.keys())
def test_random_shapes_are_those_of_a_few_kernels(calls, dtype, most, compiled, monkeypatch):
    # No kernel depends on the numbers, and to draw them takes the longest.
    monkeypatch.setattr(torch, "randn", lambda shape, generator, dtype: torch.zeros(shape, dtype=dtype))
    number = 0
    for op, call in calls():
        gradients(op, fresh(call, dtype))
        number += 1
    assert number >= 100
    constants = {name: len({constant for constant, _ in keys}) for name, keys in compiled.items()}
    assert max(constants.values()) <= MOST_CONSTANTS, constants
    kernels = {name: len(keys) for name, keys in compiled.items()}
    assert sum(kernels.values()) <= most, kernels


def test_what_triton_compiles_for_is_told_apart(compiled):
    def count() -> int:
        return len(compiled["gsm_kernels.rms_norm.kernels.forward"])

    def run(rows: int, width: int, dtype: torch.dtype = torch.float32) -> int:
        rms_norm(torch.ones(rows, width, dtype=dtype), torch.ones(width))
        return count()

    assert [run(5, 8), run(7, 8), run(5, 9)] == [1, 1, 2]  # another width is another kernel
    assert [run(32, 8), run(48, 8), run(1, 8)] == [3, 3, 4]  # so are multiples of 16, and 1
    assert run(5, 8, torch.bfloat16) == 5
    rms_norm(torch.ones(42)[2:].view(5, 8), torch.ones(8))  # begins 8 bytes after a multiple of 16
    assert count() == 6
