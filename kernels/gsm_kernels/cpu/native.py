"""Compile and call Numba loops on the CPU, and check whether they can take a call.

An operation with such loops has two files. The file in `loops` contains the compiled functions. The file in this folder
contains the conditions, shapes and autograd; it imports the other when it first runs, so that the package can be
imported without Numba. Numba compiles a loop at its first call, in 1 to 7 seconds, and caches the code on disk.

A loop takes addresses instead of arrays, because Numba needs a microsecond for each array argument, and a decoded token
makes a hundred calls. A loop processes the items [first, last). `torch.get_num_threads()` threads share the items (see
`gsm_kernels.cpu.threads`), and the results do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..launch import ROUND
from ..register import take_note
from .threads import share

HERE = Path(__file__).parent
_decorating = threading.Lock()  # because Numba's cache folder is a global setting


def missing() -> str | None:
    """Return why compiled loops cannot run on this machine, or None."""
    return _missing()


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    try:
        numba = importlib.import_module("numba")
    except (ImportError, OSError, RuntimeError) as error:  # e.g. NumPy is too new, or a library cannot be loaded
        return f"Numba cannot be imported ({error})"
    return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else None


# torch.compile cannot trace it; see `gsm_kernels.launch`.
missing._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def unfit(*given: Any, **named: Any) -> str | None:
    """Return why a compiled loop cannot take a call, or None. Tensors must be on a CPU, and not in float64.

    Args:
        given, named: the arguments of an operation, or its `Inputs`; only tensors are checked.
    """
    arguments = given[0] if given and isinstance(given[0], tuple) else given
    for x in (*arguments, *named.values()):
        if not isinstance(x, Tensor):
            continue
        if not x.is_cpu:
            return f"runs on a CPU, got a tensor on {x.device.type}"
        if x.dtype is torch.float64:
            return "computes in float32, which is too coarse for float64"
    return None


def places(x: Tensor) -> Tensor:
    """Return `x` as int64 and contiguous, as loops read integers."""
    return (x if x.dtype is torch.int64 else x.to(torch.int64)).contiguous()


def wide(x: Tensor) -> Tensor:
    """Return `x` as float32 and contiguous, as loops read numbers."""
    return (x if x.dtype is torch.float32 else x.to(torch.float32)).contiguous()


@functools.cache
def loops(operation: str) -> ModuleType:
    """Import and return the module with the compiled functions of an operation."""
    return importlib.import_module(f".loops.{operation}", __package__)


def compiled(function: Callable[..., Any], inline: bool = False) -> Any:
    """Decorate a loop. Numba compiles it at its first call, or reads it from the cache on disk.

    The compiler may reorder sums; infinities and NaN are preserved.
    """
    import numba
    from numba.core import config

    settings: Any = config  # a type checker does not know its attributes, which are set at import
    folder, fast = cache_folder(), {"reassoc", "contract", "arcp", "nsz"}
    with _decorating:
        before, settings.CACHE_DIR = settings.CACHE_DIR, folder
        try:
            how = {"nogil": True, "error_model": "numpy", "fastmath": fast, "forceinline": inline}
            return numba.njit(cache=bool(folder), **how)(function)
        finally:
            settings.CACHE_DIR = before


def part(function: Callable[..., Any]) -> Any:
    """Decorate a function that loops call, so that it is inlined into each of them.

    Without inlining, a process that compiles a loop would call the separately compiled function, and a process that
    reads the cache would use the copy in the loop. Their sums may have different orders, so that a resumed run would
    differ in the last bits.
    """
    return compiled(function, inline=True)


@functools.cache
def cache_folder() -> str:
    """Return the folder of compiled code, or "" if no folder is writable.

    Its name is a hash of the sources, because Numba does not detect changes of inlined functions in other files, and of
    the processor, because machines may share a disk. The folder is in NUMBA_CACHE_DIR if that is set, otherwise in
    __pycache__ next to this file, or in the user's cache folder if that is not writable.
    """
    from llvmlite import binding

    sources = sorted([*HERE.glob("loops/*.py"), HERE / "arrays.py", HERE / "native.py"])
    processor = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    content = b"".join(file.read_bytes() for file in sources) + processor.encode()
    name = f"numba-{hashlib.sha256(content).hexdigest()[:16]}"
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in [Path(chosen) / name] if chosen else [HERE / "__pycache__" / name, Path(user) / "gsm" / name]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return str(folder)
        except OSError:
            continue
    return ""


def run(loop: Callable[..., None], items: int, *arguments: Tensor | float, least: int = 1) -> None:
    """Run loop(first, last, *arguments) over all items, on `torch.get_num_threads()` threads.

    Args:
        loop: the compiled loop.
        items: number of items.
        arguments: numbers, and contiguous tensors, which are passed as addresses.
        least: smallest number of items per OpenMP thread; the first item of a thread is a multiple of it.
    """
    words = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    try:
        share(loop, items, words, least)
    except Exception as error:
        error.add_note(ROUND.format(loop.__name__))
        raise
    take_note(functools.partial(share, loop, items, words, least), arguments)
