"""When Triton kernels are chosen, how they are built before they are needed, and how they are launched.

Every operation with Triton kernels has two files beside its reference: `triton.py` (when it refuses, shapes, autograd;
it imports no Triton, so that the package can be imported without it) and `kernels.py` (the `@triton.jit` functions),
which the first imports when it launches. On a CPU, Triton's interpreter computes the same in float32, slowly, for
tests. It is chosen when Triton is forced (`using("triton")`) and TRITON_INTERPRET=1 was set before the first kernel was
imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from .device import triton_version
from .dispatch import KernelBuildError, forced

HOPPER = (9, 0)  # H100, H200, H800, H20 and GH200
OLDEST = (8, 0)  # the first with bfloat16 in its matrix units: what a forced choice may try
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, as Triton does where a kernel is decorated

Launcher = Callable[[Any, tuple[int, ...], tuple, dict[str, Any]], None]


def missing() -> str | None:
    """Why Triton kernels can take no call on this machine, or None. Inside `launching`, no GPU is needed."""
    if _hook() is not None:
        return None if triton_version() else "Triton is not installed"
    if INTERPRETED:
        return None if forced() == "triton" else "Triton's interpreter runs only when asked for by name"
    return _no_hopper(OLDEST if forced() == "triton" else HOPPER)


def how_to_try() -> str | None:
    """How to try the Triton kernels on a GPU where they are not chosen, in a sentence, or None."""
    if missing() is None or not torch.cuda.is_available() or triton_version() is None:
        return None
    if torch.version.hip:
        return "Triton kernels are made for NVIDIA's GPUs; on AMD's PyTorch runs everything, which nobody has tried."
    has = ".".join(map(str, torch.cuda.get_device_capability()))
    if torch.cuda.get_device_capability() < OLDEST:
        return f"Triton kernels take compute capability 8.0 or newer, this device has {has}: PyTorch runs everything."
    return (
        f"Triton kernels are made for compute capability 9.0; GSM_KERNELS=triton tries them on {has}, and "
        "`python -m pytest tests/ops` says whether they are right there."
    )


def unfit(*tensors: Tensor) -> str | None:
    """Why tensors cannot go to a Triton kernel together, or None: one device, and float32, bfloat16 or float16.

    Inside `launching`, any device will do."""
    for x in tensors:
        if _hook() is None and x.device.type not in ("cpu" if INTERPRETED else "cuda", "meta"):
            return f"needs tensors on a GPU, got {x.device.type}"
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"computes in float32, which is too coarse for {str(x.dtype).removeprefix('torch.')}"
        if INTERPRETED and _hook() is None and x.dtype == torch.bfloat16 and not x.is_meta:
            return "Triton's interpreter computes bfloat16 wrongly"
    return None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)` on the device of its tensors. An empty grid runs nothing.

    Raises:
        KernelBuildError: if it cannot be compiled, or needs more of the chip than there is.
    """
    # The default up to Triton 3.9, which warns where it is not given; 3.10 changes it.
    options = {"enable_fp_fusion": True, **options}
    if (hook := _hook()) is not None:
        hook(kernel, grid, args, options)
    elif all(grid):
        with _build_errors(kernel), _device_of(args):
            kernel[grid](*args, **options)


def cdiv(number: int, size: int) -> int:
    """How many pieces of this size a number takes, the last one perhaps not whole."""
    return -(-number // size)


def power_of_two(number: int, least: int = 1) -> int:
    """The lowest power of two that is not below the number nor below `least`, itself one."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def build_once(key: Hashable, run: Callable[[], Any]) -> None:
    """Compile whatever `run` would launch, the first time that this key is seen, without launching anything.

    An operation calls this with its backward before its first forward: a kernel that cannot be built then makes the
    dispatch fall back while nothing has been computed yet. Nothing is compiled by the interpreter, which has nothing to
    compile, inside `launching`, which sees the backward when it runs, or while `torch.compile` traces, where dispatch
    cannot fall back: there the error reaches the user.
    """
    if INTERPRETED or _hook() is not None or torch.compiler.is_compiling() or key in _built:
        return
    with launching(_build):
        run()
    _built.add(key)


@contextlib.contextmanager
def launching(instead: Launcher) -> Iterator[None]:
    """Inside the block, call `instead(kernel, grid, args, options)` where this thread would launch a kernel.

    Nothing is launched, so calls with tensors on a CPU are taken too; their results are uninitialised. Other threads
    launch as usual."""
    thread = threading.get_ident()
    before = _instead.get(thread)
    _instead[thread] = instead
    try:
        yield
    finally:
        if before is None:
            del _instead[thread]
        else:
            _instead[thread] = before


def _hook() -> Launcher | None:
    """What this thread calls in place of a launch, or None. Outside `launching` the thread is not asked for, since
    `torch.compile` cannot trace that."""
    return _instead.get(threading.get_ident()) if _instead else None


def _build(kernel: Any, _: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
    with _build_errors(kernel), _device_of(args):
        compiled = kernel.warmup(*args, grid=(1,), **options)
        _ = compiled.run  # loads it, which is where too much shared memory is found out


@contextlib.contextmanager
def _build_errors(kernel: Any) -> Iterator[None]:
    """Raise KernelBuildError, on which the dispatch falls back, for every error that means: it could not be built.

    Besides Triton's own: a missing assembler, C compiler or Python header, and a failed pass of its compiler, which is
    a RuntimeError. An error of a kernel that ran is a RuntimeError, too; it is raised as it is.
    """
    from triton.errors import TritonError

    try:
        yield
    except (TritonError, OSError, subprocess.SubprocessError, RuntimeError) as error:
        if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError) or "[CUDA]" in str(error):
            raise
        message = f"{kernel.__name__}: {type(error).__name__}: {error}; GSM_KERNELS=reference does without it"
        raise KernelBuildError(message) from error


def _device_of(args: tuple) -> contextlib.AbstractContextManager[object]:
    """Makes the device of the tensors the current one."""
    device = next((x.device for x in args if isinstance(x, Tensor)), None)
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()


def _no_hopper(oldest: tuple[int, int]) -> str | None:
    return _machine(oldest)


# As torch.compiler.assume_constant_result does, whose import takes seconds: the machine does not change, and a graph
# cannot ask for it.
_no_hopper._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _machine(oldest: tuple[int, int]) -> str | None:
    if triton_version() is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip:  # which numbers its chips as NVIDIA does, MI300 as 9.4
        return "made for NVIDIA's GPUs, and this is one of AMD's"
    capability = torch.cuda.get_device_capability()
    fits = capability == HOPPER if oldest == HOPPER else capability >= oldest
    has, needs = (".".join(map(str, version)) for version in (capability, oldest))
    return None if fits else f"made for compute capability {needs}, this device has {has}"


_instead: dict[int, Launcher] = {}  # by thread
_built: set[Hashable] = set()
