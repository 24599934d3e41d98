"""The machine: what it is, how much scratch memory suits it, and how to keep autocast out."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor


def scratch_elements(device: torch.device) -> int:
    """How many numbers a chunk's largest temporary may hold.

    On a CPU a chunk should stay near the cache (2 M numbers are 8 MB of float32); a GPU needs larger chunks to be busy.
    """
    return 1 << 21 if device.type == "cpu" else 1 << 26


def full_precision(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast does not lower the precision of operations on the device of `like`."""
    kind = "cpu" if like.is_cpu else like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return _AS_IT_IS
    return torch.autocast(kind, enabled=False)


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def ahead_of_a_graph() -> Iterator[None]:
    """Inside the block, operations choose what they would choose while a CUDA graph is captured, so that what a warm-up
    has compiled is what the graph will hold."""
    global _ahead
    before, _ahead = _ahead, True
    try:
        yield
    finally:
        _ahead = before


def for_a_graph() -> bool:
    """Whether this call is, or prepares, the capture of a CUDA graph, which cannot wait for the device."""
    return _ahead or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_ahead = False


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in the precision that operations compute in: float32, or its own if that is wider."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a dtype. Where it has that already, `to` would be called for nothing: a hundred times a decoded token."""
    return x if x.dtype == dtype else x.to(dtype)


def handed_out(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` in a dtype, to be returned by the forward of an `autograd.Function`: an object of its own, and no view.

    What `mul_`, `-=` and `out=` give back is the object that they were given; so is what `to` and `contiguous` do where
    there is nothing to do. If such an object is returned, the `torch.compile` of PyTorch 2.11 loses its gradient
    (pytorch/pytorch#180642). A view cannot be changed in place by the caller.
    """
    return in_dtype(x, dtype or x.dtype).detach()


@functools.cache
def absent(package: str, *modules: str) -> str | None:
    """Why a package of GPU kernels cannot be used here, found out by importing these modules of it; None if it can."""
    if not torch.cuda.is_available():
        return f"{package} runs on CUDA devices alone"
    if torch.version.hip:
        return f"{package} was tried on NVIDIA's GPUs alone, and this is one of AMD's"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        for module in modules:
            importlib.import_module(module)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"{package} cannot be imported ({error})"
    return None


def needs_one_half_type(*tensors: Tensor) -> str | None:
    """Why these are not for a kernel that takes its inputs all in bfloat16 or all in float16; None if they are."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}:
        return None
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return f"needs query, key and value all in bfloat16 or all in float16, got {names}"


def triton_version() -> str | None:
    """The installed Triton's version, or None."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return triton.__version__


def describe() -> str:
    """The device that operations on the default accelerator run on, in words."""
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
