"""Properties of the machine, suitable sizes of scratch memory, and precision under autocast."""

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

HOPPER = (9, 0)  # H100, H200, H800, H20 and GH200
FENCED = (3, 7, 1)  # first Triton version with correct results on Hopper
ASSEMBLER = "ptxas-blackwell"  # CUDA 13.1's in the wheel of Triton 3.7.1


def scratch_elements(device: torch.device) -> int:
    """Return the largest number of elements of a chunk's largest temporary.

    On a CPU a chunk should fit the cache (2 M elements are 8 MB of float32); a GPU needs larger chunks to be busy.
    """
    return 1 << 21 if device.type == "cpu" else 1 << 26


def full_precision(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast does not lower the precision of operations on the device of `like`."""
    kind = "cpu" if like.is_cpu else like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return _UNCHANGED
    return torch.autocast(kind, enabled=False)


_UNCHANGED = contextlib.nullcontext()


@contextlib.contextmanager
def ahead_of_a_graph() -> Iterator[None]:
    """Make operations choose the same implementations as during the capture of a CUDA graph, for a warm-up.

    Then the warm-up compiles the kernels that the graph will contain.
    """
    global _ahead
    before, _ahead = _ahead, True
    try:
        yield
    finally:
        _ahead = before


def for_a_graph() -> bool:
    """Return whether this call is in, or prepares, the capture of a CUDA graph, which cannot wait for the device."""
    return _ahead or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_ahead = False


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in the precision of computation: float32, or its own if that is wider."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in a dtype, without the call of `to` if it has it already: a hundred calls per decoded token."""
    return x if x.dtype == dtype else x.to(dtype)


def handed_out(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` in a dtype as the output of an `autograd.Function`: a new tensor object, and not a view.

    `mul_`, `-=` and `out=` return their argument itself, and so do `to` and `contiguous` if there is nothing to do. If
    a forward returns such an object, the `torch.compile` of PyTorch 2.11 loses its gradient (pytorch/pytorch#180642). A
    view could not be changed in place by the caller.
    """
    return in_dtype(x, dtype or x.dtype).detach()


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of an `autograd.Function` raise RuntimeError for `create_graph=True`.

    It treats the saved tensors as constants, so second derivatives would be wrong. PyTorch's `once_differentiable`
    raises an error only if the incoming gradient has a graph.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph must be False, as the backward passes of gsm_kernels have no derivative, got True; use "
                "finite differences of gradients for second derivatives"
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
    """Return why a package of Triton kernels cannot be used, or None. It imports these modules to find out."""
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
    """Return why query, key and value are not for a package of GPU kernels, or None; ``waits``: the call waits for the
    device."""
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
    """Return why no Triton kernel may run on this GPU, with the remedy, or None.

    Before 3.7.1, Triton omits a fence between copies to shared memory and the wgmma that reads them
    (triton-lang/triton#9610), so that results on Hopper depend on timing.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", triton_version() or "")[:3])
    if not release or release >= FENCED or torch.cuda.get_device_capability() != HOPPER:
        return None
    return (
        f"Triton must be 3.7.1 on Hopper, got {triton_version()}, whose kernels may read shared memory before it is "
        "written; use `pip install triton==3.7.1`, or PyTorch 2.13, which brings it"
    )


def choose_assembler() -> None:
    """Let Triton assemble by CUDA 13.1, which lies in its own wheel, where PyTorch's CUDA 13 shows that the driver runs
    such code. TRITON_PTXAS_PATH goes first.

    The assembler of CUDA 12.8, Triton's default on Hopper, lets some products read a register that nothing has written
    (triton-lang/triton#11366).
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
    """Describe the default device of operations."""
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
