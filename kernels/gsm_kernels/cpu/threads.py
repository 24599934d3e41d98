"""Run a compiled loop on several threads: OpenMP threads if PyTorch includes GNU OpenMP (Linux), else Python threads.

OpenMP threads also run PyTorch's operations. They spin for a while between tasks, so that starting a loop takes 2 to 4
microseconds. A loop always starts all of them: GNU OpenMP would end the threads outside of a smaller team, and the next
operation of PyTorch would have to start them again. Python threads sleep between tasks and share the interpreter lock
with the caller. Starting them takes 15 to 100 microseconds, which may be as long as the loop itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SLOWER = 8  # a Python thread takes at least `least` times this number of items
_STARTED = os.getpid()  # a forked process does not have the OpenMP threads, although OpenMP assumes that it does

# Without this, PyTorch's operations in a forked process, e.g. a DataLoader worker, wait for these threads forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def share(loop: Callable[..., None], items: int, arguments: Sequence[float], least: int) -> None:
    """Run a loop over all items, in parts of equal size, on `torch.get_num_threads()` threads.

    Args:
        loop: takes the first item of a part, the end of the part (exclusive), and `arguments`.
        items: number of items.
        arguments: the other arguments of the loop.
        least: smallest number of items per OpenMP thread; the first item of a part is a multiple of it.
    """
    if torch.get_num_threads() == 1 or items <= least:
        loop(0, items, *arguments)
    elif (team := _team(loop, arguments)) is not None:
        team.run(items, torch.get_num_threads(), _part(items, least), arguments)
    else:
        _pooled(loop, items, arguments, least)


def _part(items: int, least: int) -> int:
    """Return the number of items per part, a multiple of `least`."""
    parts = min(torch.get_num_threads(), -(-items // least))
    return -(-items // (parts * least)) * least


def _pooled(loop: Callable[..., None], items: int, arguments: Sequence[float], least: int) -> None:
    each = _part(items, least * SLOWER)
    starts = range(0, items, each)
    pool = _pool(os.getpid())
    pieces = [pool.submit(loop, start, min(start + each, items), *arguments) for start in starts[1:]]
    try:
        loop(0, min(each, items), *arguments)
    finally:
        wait(pieces)  # they write to tensors that the caller may release after an error
    for other in pieces:
        other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the pool of Python threads; a forked process gets a new one."""
    return ThreadPoolExecutor(max_workers=256, thread_name_prefix="gsm_kernels")


# LLVM code of the function that each OpenMP thread runs. Thread n runs part n and, if there are fewer threads than
# parts, every `threads`-th part after it. The argument is an array of 8-byte words: a status, the number of items, the
# items per part, and the other arguments of the loop. The loop is called by Numba's calling convention.
MEMBER = """
define void @member(ptr %words) {{
begin:
  %number = call i32 inttoptr (i64 {number} to ptr)()
  %threads = call i32 inttoptr (i64 {threads} to ptr)()
  %part = zext i32 %number to i64
  %step = zext i32 %threads to i64
  %items.at = getelementptr i64, ptr %words, i64 1
  %items = load i64, ptr %items.at
  %each.at = getelementptr i64, ptr %words, i64 2
  %each = load i64, ptr %each.at
  %returned = alloca ptr
  %raised = alloca ptr
{loads}
  br label %next
next:
  %now = phi i64 [ %part, %begin ], [ %later, %run ], [ %later, %fail ]
  %first = mul i64 %now, %each
  %some = icmp slt i64 %first, %items
  br i1 %some, label %run, label %end
run:
  %whole = add i64 %first, %each
  %full = icmp slt i64 %whole, %items
  %last = select i1 %full, i64 %whole, i64 %items
  %status = call i32 inttoptr (i64 {loop} to ptr)(ptr %returned, ptr %raised, i64 %first, i64 %last{arguments})
  %later = add i64 %now, %step
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %fail, label %next
fail:
  %wide = sext i32 %status to i64
  store i64 %wide, ptr %words
  br label %next
end:
  ret void
}}
"""


@dataclass(frozen=True)
class _Team:
    """A loop that is compiled for OpenMP threads.

    Attributes:
        member: address of the function that each thread runs.
        words: format of its argument.
        engine: owns the machine code.
    """

    member: int
    words: struct.Struct
    engine: Any

    def run(self, items: int, threads: int, each: int, arguments: Sequence[float]) -> None:
        """Run the loop over all items, in parts of `each`.

        Raises:
            RuntimeError: if the loop raises an error.
        """
        words = ctypes.create_string_buffer(self.words.pack(0, items, each, *arguments))
        _library().GOMP_parallel(ctypes.c_void_p(self.member), words, threads, 0)
        if status := struct.unpack_from("q", words)[0]:
            raise RuntimeError(f"a compiled loop raised an error on an OpenMP thread (status {status})")


def _team(loop: Callable[..., None], arguments: Sequence[float]) -> _Team | None:
    """Return the loop for OpenMP threads, for arguments of these types; None if OpenMP cannot run it."""
    compiled = hasattr(loop, "overloads")
    if not compiled or os.getpid() != _STARTED or _library() is None:
        return None
    return _member(loop, "".join("d" if isinstance(x, float) else "q" for x in arguments))


@functools.cache
def _library() -> Any:
    """Return the GNU OpenMP library that PyTorch has loaded, or None."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            library.GOMP_parallel.restype = None
            return library
    return None


@functools.cache
def _member(loop: Any, kinds: str) -> _Team:
    """Compile the loop, unless it is cached on disk, and the function that calls it (a few milliseconds)."""
    from llvmlite import binding
    from numba import float64, int64

    signature = (int64, int64, *({"q": int64, "d": float64}[kind] for kind in kinds))
    loop.compile(signature)
    compiled, library = loop.overloads[signature], _library()
    typed = [({"q": "i64", "d": "double"}[kind], f"%a{index}") for index, kind in enumerate(kinds)]
    loads = [
        line
        for place, (kind, name) in enumerate(typed, start=3)
        for line in (
            f"  {name}.at = getelementptr i64, ptr %words, i64 {place}",
            f"  {name} = load {kind}, ptr {name}.at",
        )
    ]
    text = MEMBER.format(
        number=_address(library.omp_get_thread_num),
        threads=_address(library.omp_get_num_threads),
        loop=compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name),
        loads="\n".join(loads),
        arguments="".join(f", {kind} {name}" for kind, name in typed),
    )
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(opt=2)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
    engine.finalize_object()
    return _Team(engine.get_function_address("member"), struct.Struct(f"qqq{kinds}"), engine)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
