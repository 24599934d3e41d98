"""Conditions for Triton kernels, their compilation ahead of time, and their launch.

Every operation with Triton kernels has two files beside its reference. `triton.py` has its refusals, shapes and
autograd; it imports no Triton, so that the package can be imported without it. `kernels.py` has the `@triton.jit`
functions, which the first imports at its first launch. On a CPU, Triton's interpreter computes the same in float32,
slowly, for tests. It is chosen when Triton is forced (`using("triton")`) and TRITON_INTERPRET=1 was set before the
first kernel was imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .device import HOPPER, choose_assembler, no_nvidia_gpu, triton_version, unfenced_triton
from .dispatch import forced

OLDEST = (8, 0)  # oldest compute capability for a forced choice: the first with bfloat16 in its matrix units
ROUND = "In the kernel {}. GSM_KERNELS=reference computes with PyTorch's operations instead."
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, as Triton does when a kernel is decorated

Launcher = Callable[[Any, tuple[int, ...], tuple, dict[str, Any]], object]


def missing() -> str | None:
    """Return why Triton kernels can take no call on this machine, or None. Inside `launching`, no GPU is needed."""
    if _hook() is not None:
        return None if triton_version() else "Triton is not installed"
    if INTERPRETED:
        return None if forced() == "triton" else "Triton's interpreter runs only with GSM_KERNELS=triton"
    return _no_hopper(OLDEST if forced() == "triton" else HOPPER)


def unready() -> str | None:
    """Return why a Hopper GPU would train without its kernels, with the remedy, or None.

    The dispatch would choose PyTorch, which is several times slower, so a training run stops instead; it stops with
    forced kernels of an older Triton, too, whose results depend on timing. None on other machines, and if GSM_KERNELS
    forces another implementation.
    """
    if forced() not in ("auto", "triton") or INTERPRETED or not torch.cuda.is_available() or torch.version.hip:
        return None
    if torch.cuda.get_device_capability() != HOPPER:
        return None
    remedy = "or set GSM_KERNELS=reference to train with PyTorch's operations"
    if triton_version() is None:
        return f"Triton is not installed. Use `pip install triton==3.7.1`, {remedy}"
    if (refusal := _machine(HOPPER)) is not None:
        return f"{refusal}, {remedy}"
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        return f"Triton finds no C compiler. Install one (`apt-get install gcc`), or name it in CC, {remedy}"
    return None


def unfit(*tensors: Tensor) -> str | None:
    """Return why tensors cannot go to a Triton kernel, or None. It takes float32, bfloat16 and float16 on a GPU.

    Inside `launching`, any device is allowed.
    """
    for x in tensors:
        if _hook() is None and x.device.type not in ("cpu" if INTERPRETED else "cuda", "meta"):
            return f"needs tensors on a GPU, got {x.device.type}"
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"computes in float32, which is too coarse for {str(x.dtype).removeprefix('torch.')}"
        if INTERPRETED and _hook() is None and x.dtype == torch.bfloat16 and not x.is_meta:
            return "Triton's interpreter computes bfloat16 wrongly"
    return None


def in_float32(*operands: Tensor) -> str | None:
    """Return why PyTorch multiplies these operands faster than Triton kernels would, or None.

    The kernels multiply float32 without the matrix units, and their registers spill. A forced choice runs them all the
    same, for tests.
    """
    if forced() == "triton" or all(x.dtype != torch.float32 for x in operands):
        return None
    return "multiplies float32 more slowly than PyTorch. Use bfloat16 or float16"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)` on the device of its tensors. An empty grid runs nothing.

    Triton's errors are raised, with a note: a kernel that cannot be built never falls back to slow operations unseen.
    """
    # The default up to Triton 3.9, which warns if it is not set; 3.10 changes it.
    options = {"enable_fp_fusion": True, **options}
    if (hook := _hook()) is not None:
        hook(kernel, grid, args, options)
    elif all(grid):
        with device_of(args):
            try:
                kernel[grid](*args, **options)
            except Exception as error:
                error.add_note(ROUND.format(kernel.__name__))
                raise


def cdiv(number: int, size: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // size)


def power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `number` and at least `least`, itself a power of two."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@contextlib.contextmanager
def launching(instead: Launcher) -> Iterator[None]:
    """Inside the block, call `instead(kernel, grid, args, options)` in place of every launch of this thread.

    Nothing is launched, so calls with tensors on a CPU are allowed too; their results are uninitialised. Other threads
    launch as usual.
    """
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


def building() -> bool:
    """Return whether this thread is inside `launching`."""
    return _hook() is not None


def _hook() -> Launcher | None:
    """Return the function that this thread calls in place of a launch, or None.

    Outside `launching` the thread's id is not read, because `torch.compile` cannot trace that.
    """
    return _instead.get(threading.get_ident()) if _instead else None


def device_of(args: tuple) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the device of the tensors is the current one."""
    device = next((x.device for x in args if isinstance(x, Tensor)), None)
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()


def _no_hopper(oldest: tuple[int, int]) -> str | None:
    return _machine(oldest)


# Like torch.compiler.assume_constant_result, but its import takes seconds. The machine is constant, and a graph cannot
# query it.
_no_hopper._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _machine(oldest: tuple[int, int]) -> str | None:
    if triton_version() is None:
        return "Triton is not installed"
    if (refusal := no_nvidia_gpu()) is not None:
        return refusal
    capability = torch.cuda.get_device_capability()
    if (refusal := unfenced_triton()) is not None:
        if oldest == HOPPER:
            return refusal
        warnings.warn(f"{refusal}. Forced kernels run all the same, for timing alone", RuntimeWarning, stacklevel=2)
    choose_assembler()
    if capability == oldest or capability >= oldest != HOPPER:
        return None
    has, needs = (".".join(map(str, version)) for version in (capability, oldest))
    trial = "; GSM_KERNELS=triton tries it" if oldest == HOPPER and capability >= OLDEST else ""
    return f"made for compute capability {needs}, this device has {has}{trial}"


_instead: dict[int, Launcher] = {}  # by thread
