"""When loops for the CPU are chosen, how they are compiled, and how they are called.

Every operation with such loops has two files beside its reference: `numba.py` (when it refuses, shapes, autograd; it
imports no Numba, so that the package can be imported without it) and `loops.py` (the compiled functions), which the
first imports when it runs. Numba compiles a loop at its first call, in 1 to 7 seconds, and keeps the code on disk.

A loop takes addresses and makes arrays of them: given arrays, Numba needs a microsecond for each, and a decoded token
is a hundred calls. It works on items first to last; items are shared among `torch.get_num_threads()` threads (see
`gsm_kernels.threads`), and what it writes does not depend on how many there are.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .dispatch import KernelBuildError
from .threads import share

HERE = Path(__file__).parent
_decorating = threading.Lock()  # what says where code is kept is one for all threads
_here = threading.local()  # `note`, of whoever takes notes in this thread

COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # what turns a terminal's letters


def missing() -> str | None:
    """Why compiled loops can take no call on this machine, or None."""
    return _missing()


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    try:
        numba = importlib.import_module("numba")
    except (ImportError, OSError, RuntimeError) as error:  # a NumPy that is too new, a library that cannot be loaded
        return f"Numba cannot be imported ({error})"
    return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else None


# A graph cannot ask for it; see `gsm_kernels.launch`.
missing._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def numba_version() -> str | None:
    """The installed Numba's version, or None."""
    return importlib.metadata.version("numba") if importlib.util.find_spec("numba") else None


def unfit(*tensors: Tensor) -> str | None:
    """Why tensors cannot go to a compiled loop, or None: on a CPU, in float32, bfloat16 or float16."""
    for x in tensors:
        if not x.is_cpu:
            return f"runs on a CPU, got a tensor on {x.device.type}"
        if x.dtype is torch.float64:
            return "computes in float32, which is too coarse for float64"
    return None


def watched() -> bool:
    """Whether somebody looks at the operators of this call: a compiler, recomputation that keeps some results, tensors
    without memory. A loop then has to be one of them: what it writes through an address, nobody sees. Whoever takes
    `notes` does."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > noted()


def noted() -> bool:
    """Whether somebody takes notes of the loops that this thread runs."""
    return getattr(_here, "note", None) is not None


@contextmanager
def notes(note: Callable[[Callable[[], None], tuple[Tensor | float, ...]], None]) -> Iterator[None]:
    """Inside the block, `note` is given what repeats each loop that this thread has run, on the same tensors, and its
    arguments, which have to be kept as long as it is. For a dispatch mode, which sees all other operators itself."""
    before, _here.note = getattr(_here, "note", None), note
    try:
        yield
    finally:
        _here.note = before


def places(x: Tensor) -> Tensor:
    """Integers as loops read them: in int64, without gaps."""
    return (x if x.dtype is torch.int64 else x.to(torch.int64)).contiguous()


def wide(x: Tensor) -> Tensor:
    """Numbers as loops read them: in float32, without gaps."""
    return (x if x.dtype is torch.float32 else x.to(torch.float32)).contiguous()


@functools.cache
def loops(package: str) -> ModuleType:
    """The compiled functions of an operation's package, imported when they are first needed."""
    return importlib.import_module(".loops", package)


def compiled(function: Callable[..., Any], inline: bool = False) -> Any:
    """A decorator: the loop, compiled at its first call or read from the cache.

    Sums may be computed in another order than they are written in; infinities and NaN stay what they are."""
    import numba
    from numba.core import config

    settings: Any = config  # whose names Numba makes when it is imported
    folder, fast = cache_folder(), {"reassoc", "contract", "arcp", "nsz"}
    with _decorating:
        before, settings.CACHE_DIR = settings.CACHE_DIR, folder
        try:
            how = {"nogil": True, "error_model": "numpy", "fastmath": fast, "forceinline": inline}
            return numba.njit(cache=bool(folder), **how)(function)
        finally:
            settings.CACHE_DIR = before


def part(function: Callable[..., Any]) -> Any:
    """A decorator for what loops call: it is compiled into each of them.

    Else the process that compiles would call it as it was compiled by itself, and one that reads the cache as it was
    compiled with the loop: two orders of the same sums, and a run that is resumed would differ in its last bits."""
    return compiled(function, inline=True)


@functools.cache
def cache_folder() -> str:
    """Where compiled code is kept; empty where nothing can be written.

    Its name follows from the sources: Numba sees that a file has changed, but not one whose functions it has inlined;
    and from the processor: several that share a disk could mistake each other's code for their own. NUMBA_CACHE_DIR
    says where it lies, else it is beside these files, or in the home of whoever may not write there.
    """
    from llvmlite import binding

    sources = sorted([*HERE.glob("*/loops.py"), HERE / "arrays.py", HERE / "native.py"])
    processor = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    content = b"".join(file.read_bytes() for file in sources) + processor.encode()
    name = f"numba-{hashlib.sha256(content).hexdigest()[:16]}"
    own, home = os.environ.get("NUMBA_CACHE_DIR"), os.path.expanduser("~/.cache/gsm")
    for folder in [Path(own) / name] if own else [HERE / "__pycache__" / name, Path(home) / name]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return str(folder)
        except OSError:
            continue
    return ""


def run(loop: Callable[..., None], items: int, *arguments: Tensor | float, least: int = 1) -> None:
    """Runs loop(first, last, *arguments) over all items, on as many threads as PyTorch uses.

    Args:
        arguments: numbers, and contiguous tensors, of which the loop is given the addresses.
        least: items that are worth a thread of OpenMP's; a thread's items begin at a multiple of it.

    Raises:
        KernelBuildError: if Numba cannot compile it.
    """
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    try:
        share(loop, items, given, least)
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "numba":
            raise
        first = str(error).strip().partition("\n")[0]
        first = COLOUR.sub("", first)  # Numba writes in bold where it finds colorama
        raise KernelBuildError(f"{type(error).__name__}: {first}; GSM_KERNELS=reference does without it") from error
    if noted():
        _here.note(functools.partial(share, loop, items, given, least), arguments)
