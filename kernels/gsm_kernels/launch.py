"""Launch Triton kernels, and check whether this machine and these tensors allow it.

An operation with Triton kernels has two files beside its reference. `kernels.py` contains the `@triton.jit` functions.
`triton.py` contains the conditions, shapes and autograd; it imports `kernels.py` at the first launch, so that the
package can be imported without Triton.

For tests without a GPU, Triton's interpreter runs the kernels on the CPU, slowly. It needs `using("triton")`, and
TRITON_INTERPRET=1 from before the first import of a kernel.
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

OLDEST = (8, 0)  # lowest compute capability for forced kernels: the first whose tensor cores take bfloat16
ROUND = "In the kernel {}. GSM_KERNELS=reference computes with PyTorch's operations instead."
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, as Triton does when a kernel is decorated

Launcher = Callable[[Any, tuple[int, ...], tuple, dict[str, Any]], object]


def missing() -> str | None:
    """Return why Triton kernels cannot run on this machine, or None. Inside `launching`, no GPU is needed."""
    if _hook() is not None:
        return None if triton_version() else "Triton is not installed"
    if INTERPRETED:
        return None if forced() == "triton" else "Triton's interpreter runs only with GSM_KERNELS=triton"
    return _no_hopper(OLDEST if forced() == "triton" else HOPPER)


def unready() -> str | None:
    """Return why Triton kernels cannot run on this Hopper GPU, with the remedy, or None.

    A training run calls this and stops: with PyTorch's operations instead, it would be several times slower. It also
    stops with an older Triton whose results depend on timing (see `unfenced_triton`). The result is None on other
    machines, and if GSM_KERNELS forces another implementation.
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
    """Return why Triton kernels cannot take these tensors, or None.

    They take float32, bfloat16 and float16 on a GPU. Inside `launching`, any device is allowed.
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
    """Return why PyTorch multiplies these operands faster than Triton kernels, or None.

    The kernels multiply float32 without tensor cores, and spill registers. Forced kernels run anyway, for tests.
    """
    if forced() == "triton" or all(x.dtype != torch.float32 for x in operands):
        return None
    return "multiplies float32 more slowly than PyTorch. Use bfloat16 or float16"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)` on the device of its tensors. An empty grid runs nothing.

    An error of Triton is raised, with a note on how to avoid the kernel; there is no silent fallback to PyTorch.
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
    """Return number / size, rounded up."""
    return -(-number // size)


def power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `number` and at least `least`, itself a power of two."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@contextlib.contextmanager
def launching(instead: Launcher) -> Iterator[None]:
    """Call `instead(kernel, grid, args, options)` inside the block, in place of every launch by this thread.

    Use it to compile kernels or to record launches without a GPU: tensors may be on any device, and results are
    uninitialised. Other threads launch as usual.
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

    The thread's id is read only if some thread is inside `launching`, because `torch.compile` cannot trace it.
    """
    return _instead.get(threading.get_ident()) if _instead else None


def device_of(args: tuple) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the GPU of the first tensor is the current device."""
    device = next((x.device for x in args if isinstance(x, Tensor)), None)
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()


def _no_hopper(oldest: tuple[int, int]) -> str | None:
    return _machine(oldest)


# Like torch.compiler.assume_constant_result, whose import takes seconds: torch.compile cannot trace the query.
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
        warnings.warn(f"{refusal}. Forced kernels run anyway: use them for timing only", RuntimeWarning, stacklevel=2)
    choose_assembler()
    if capability == oldest or capability >= oldest != HOPPER:
        return None
    has, needs = (".".join(map(str, version)) for version in (capability, oldest))
    trial = "; GSM_KERNELS=triton tries it" if oldest == HOPPER and capability >= OLDEST else ""
    return f"made for compute capability {needs}, this device has {has}{trial}"


_instead: dict[int, Launcher] = {}  # by thread id
