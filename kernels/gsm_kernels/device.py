"""Checks of the device and of installed packages, sizes of scratch memory, and the precision of computation."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOPPER = (9, 0)  # compute capability of H100, H200, H800, H20 and GH200
FENCED = (3, 7, 1)  # first Triton version with correct results on Hopper
ASSEMBLER = "ptxas-blackwell"  # the ptxas of CUDA 13.1 in the wheel of Triton 3.7.1


def scratch_elements(device: torch.device) -> int:
    """Return how many elements the largest temporary tensor of a chunk may have.

    On a CPU a chunk should fit the cache (2 M elements are 8 MB in float32). A GPU needs larger chunks to be busy.
    """
    return 1 << 21 if device.type == "cpu" else 1 << 26


def full_precision(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context that disables autocast on the device of `like`."""
    kind = "cpu" if like.is_cpu else like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return _UNCHANGED
    return torch.autocast(kind, enabled=False)


_UNCHANGED = contextlib.nullcontext()


@contextlib.contextmanager
def ahead_of_a_graph() -> Iterator[None]:
    """Choose implementations as during the capture of a CUDA graph, so that a warm-up compiles the graph's kernels."""
    global _ahead
    before, _ahead = _ahead, True
    try:
        yield
    finally:
        _ahead = before


def for_a_graph() -> bool:
    """Return whether a CUDA graph is being captured or prepared; such a call must not wait for the device."""
    return _ahead or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_ahead = False


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in the dtype of computation: float64 stays, all others become float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in a dtype, without calling `to` if nothing changes: a decoded token calls this a hundred times."""
    return x if x.dtype == dtype else x.to(dtype)


def handed_out(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` as a new tensor object, in a dtype, for the output of an `autograd.Function`.

    `mul_`, `-=` and `out=` return their argument itself, and so do `to` and `contiguous` if nothing changes. If a
    forward returns such an object, `torch.compile` in PyTorch 2.11 loses its gradient (pytorch/pytorch#180642). For
    autograd the result is not a view, so the caller can change it in place.
    """
    return in_dtype(x, dtype or x.dtype).detach()


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an `autograd.Function` to raise RuntimeError for `create_graph=True`.

    These backward passes treat saved tensors as constants, so second derivatives would be wrong. PyTorch's
    `once_differentiable` raises an error only if the incoming gradient requires a gradient.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph must be False, got True: gsm_kernels has first derivatives only; use finite differences "
                "of gradients for second derivatives"
            )
        return backward(ctx, *grads)

    return call


def no_nvidia_gpu() -> str | None:
    """Return why kernels for NVIDIA GPUs cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "runs on NVIDIA GPUs only"
    # AMD's capability numbers look like NVIDIA's: MI300 is 9.4.
    return "runs on NVIDIA GPUs only, and this is an AMD GPU" if torch.version.hip else None


def absent(package: str, *modules: str) -> str | None:
    """Import modules of a package of Triton kernels; return why the package cannot be used, or None."""
    return "cannot be traced into a graph" if torch.compiler.is_compiling() else _absent(package, *modules)


@functools.cache
def _absent(package: str, *modules: str) -> str | None:
    if (refusal := no_nvidia_gpu()) is not None:
        return f"{package} {refusal}"
    if (refusal := unfenced_triton()) is not None:
        return refusal
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        for module in modules:
            importlib.import_module(module)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"{package} cannot be imported ({error})"
    return None


def unfit_for_package(*tensors: Tensor, waits: bool = False) -> str | None:
    """Return why a package of GPU kernels cannot take this call, or None.

    Args:
        tensors: query, key and value.
        waits: whether the call waits for the device, which a CUDA graph does not allow.
    """
    if tensors[0].device.type != "cuda":
        return f"needs tensors on a GPU, got {tensors[0].device.type}"
    if waits and for_a_graph():
        return "waits for the device, which a CUDA graph cannot"
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}:
        return None
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return f"needs query, key and value all in bfloat16 or all in float16, got {names}"


def triton_version() -> str | None:
    """Return the version of the installed Triton, or None."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return triton.__version__


def unfenced_triton() -> str | None:
    """Return why Triton's kernels give wrong results on this GPU, with the remedy, or None.

    Before 3.7.1, Triton omits a fence between a copy to shared memory and the wgmma that reads it, so that results on
    Hopper depend on timing (triton-lang/triton#9610).
    """
    release = tuple(int(number) for number in re.findall(r"\d+", triton_version() or "")[:3])
    if not release or release >= FENCED or torch.cuda.get_device_capability() != HOPPER:
        return None
    return (
        f"Triton must be 3.7.1 on Hopper, got {triton_version()}, whose kernels may read shared memory before it is "
        "written; use `pip install triton==3.7.1`, or PyTorch 2.13, which brings it"
    )


def choose_assembler() -> None:
    """Set TRITON_PTXAS_PATH to the ptxas of CUDA 13.1 in Triton's wheel, unless it is set already.

    With the ptxas of CUDA 12.8, Triton's default on Hopper, some matrix products read an uninitialised register
    (triton-lang/triton#11366). Code of CUDA 13.1 needs a recent driver, which a PyTorch for CUDA 13 needs too, so this
    does nothing with an older PyTorch.
    """
    import triton

    newer = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / ASSEMBLER
    if int((torch.version.cuda or "0").partition(".")[0]) >= 13 and newer.is_file():
        os.environ.setdefault("TRITON_PTXAS_PATH", str(newer))


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> str:
    """Return the name of the GPU and its compute capability, or "CPU" and the number of threads."""
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
