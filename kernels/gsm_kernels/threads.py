"""How a compiled loop is shared among threads: OpenMP's where PyTorch brings GNU's OpenMP (Linux), else Python's.

OpenMP's threads are those of PyTorch's own operations. They wait for work by spinning a while, and are handed a loop in
2 to 4 microseconds. All of them are, whether there is a part for each or not: GNU's OpenMP ends those that a smaller
team leaves out, and PyTorch's next operation would have to start them again. Python's sleep in between and take turns
with the caller in holding the interpreter: 15 to 100 microseconds, for loops that may take 100 themselves.
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

SLOWER = 8  # times as many items are worth one of Python's threads
_STARTED = os.getpid()  # a process forked from this one has none of its threads, though OpenMP believes that it has


def share(loop: Callable[..., None], items: int, given: Sequence[float], least: int) -> None:
    """Runs a loop over all items, in parts of equal size, on as many threads as PyTorch uses.

    Args:
        loop: takes the first and the last item of a part, and `given`.
        least: items that are worth a thread of OpenMP's; a part begins at a multiple of it.
    """
    if torch.get_num_threads() == 1 or items <= least:
        loop(0, items, *given)
    elif (team := _team(loop, given)) is not None:
        team.run(items, torch.get_num_threads(), _part(items, least), given)
    else:
        _pooled(loop, items, given, least)


def _part(items: int, least: int) -> int:
    """The items of a part: as many for each thread, and a multiple of those that are worth one."""
    parts = min(torch.get_num_threads(), -(-items // least))
    return -(-items // (parts * least)) * least


def _pooled(loop: Callable[..., None], items: int, given: Sequence[float], least: int) -> None:
    each = _part(items, least * SLOWER)
    starts = range(0, items, each)
    pool = _pool(os.getpid())
    others = [pool.submit(loop, start, min(start + each, items), *given) for start in starts[1:]]
    try:
        loop(0, min(each, items), *given)
    finally:
        wait(others)  # they write to tensors that an error would let go
    for other in others:
        other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads beside the caller's own, made as they are needed; a forked process has none of its parent's."""
    return ThreadPoolExecutor(max_workers=256, thread_name_prefix="gsm_kernels")


# What OpenMP runs on each of its threads: the part of its own number, and of every `threads`-th after it, should there
# be fewer threads than parts. The words of 8 bytes that it is given: a status, the items, those of a part, and the
# other arguments of the loop, which is called as Numba calls it.
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
  %kept = sext i32 %status to i64
  store i64 %kept, ptr %words
  br label %next
end:
  ret void
}}
"""


@dataclass(frozen=True)
class _Team:
    """One loop, ready for OpenMP's threads.

    Attributes:
        member: address of the C function that each of them runs.
        words: how its arguments are packed.
        engine: owns the machine code.
    """

    member: int
    words: struct.Struct
    engine: Any

    def run(self, items: int, threads: int, each: int, given: Sequence[float]) -> None:
        """Runs the loop over all items, `each` at a time. Raises RuntimeError if the loop raises something."""
        words = ctypes.create_string_buffer(self.words.pack(0, items, each, *given))
        _library().GOMP_parallel(ctypes.c_void_p(self.member), words, threads, 0)
        if status := struct.unpack_from("q", words)[0]:
            raise RuntimeError(f"a compiled loop has raised an error on one of OpenMP's threads (status {status})")


def _team(loop: Callable[..., None], given: Sequence[float]) -> _Team | None:
    """The loop as OpenMP's threads run it with arguments of these kinds; None where they cannot."""
    compiled = hasattr(loop, "overloads")
    if not compiled or os.getpid() != _STARTED or _library() is None:
        return None
    return _member(loop, "".join("d" if isinstance(x, float) else "q" for x in given))


@functools.cache
def _library() -> Any:
    """GNU's OpenMP as PyTorch has loaded it, or None."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.CDLL(str(path))
            found.GOMP_parallel.restype = None
            return found
    return None


@functools.cache
def _member(loop: Any, kinds: str) -> _Team:
    """Compiles what calls the loop (milliseconds), and the loop, unless it is in the cache."""
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
