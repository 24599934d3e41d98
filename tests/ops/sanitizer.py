"""Errors of Triton kernels that Triton's interpreter does not feel and a GPU would, found without a GPU.

    with using("triton"), sanitizer.watching() as report:    # TRITON_INTERPRET=1 from the start of the process
        op(**call)
    assert not report.findings, report

The interpreter runs one program after the other on memory of the CPU: what a program reads beside its tensors, or
before another one has written it, is there by luck. So every launch's addresses are kept, and judged by `KINDS`. What
is undefined on a GPU becomes NaN, or the largest integer: lanes that a load masks off without `other`, and memory that
`torch.empty` has just given. It then reaches the results, or an address out of bounds. A `tl.dot` that the compiler
would refuse is an error. Lanes out of bounds do nothing, so that the process lives on.

Programs run backwards, from the last to the first, since a GPU promises no order. Threads of a program are not
simulated: where lanes touch what other lanes have touched, and one of them writes, a barrier is asked for, without
which it is right only by luck of the layouts. A lane is a place in a block; that blocks of one shape have one layout is
taken for granted.

Not seen: a block that lies wholly in another tensor of the launch, or in the gaps of a strided one; races between
numbers of different sizes, of which only the first bytes are compared. Meanwhile torch computes deterministically,
which is what makes it fill `torch.empty`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsm_kernels.launch import INTERPRETED

KINDS = {
    "bounds": "an access reaches beside the launch's tensors, or lies in two of them",
    "write race": "two programs write one address, not both by atomics",
    "read race": "a program reads what another one writes",
    "order": "lanes touch what others of their program have touched, one of them writing, with no barrier between",
    "lanes": "a store writes one address twice, with different values",
}

Addresses = NDArray[np.uint64]


class Finding(NamedTuple):
    """One kind of error in one kernel.

    kind: a key of `KINDS`.
    kernel: its function's name.
    detail: where it was seen first.
    """

    kind: str
    kernel: str
    detail: str


@dataclass
class Report:
    """What was seen.

    launches: how many, by kernel.
    found: how often each kind of error was seen in each kernel, and where first.
    """

    launches: Counter[str] = field(default_factory=Counter)
    found: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        """Each kind of error in each kernel once."""
        return [Finding(kind, kernel, detail) for (kind, kernel), (_, detail) in self.found.items()]

    def note(self, kind: str, kernel: str, detail: str) -> None:
        """One more error."""
        times, first = self.found.get((kind, kernel), (0, detail))
        self.found[kind, kernel] = (times + 1, first)

    def __str__(self) -> str:
        seen = f"{self.launches.total()} launches of {len(self.launches)} kernels"
        lines = [
            f"{kernel}: {kind}: {KINDS[kind]}: {detail} (seen {times} times)"
            for (kind, kernel), (times, detail) in self.found.items()
        ]
        return "\n".join([f"{seen}: {len(lines) or 'no'} errors", *lines])


@contextlib.contextmanager
def watching(backwards: bool = True) -> Iterator[Report]:
    """Inside the block, every launch in the interpreter is judged, and what is undefined is made useless.

    Args:
        backwards: programs run from the last to the first.

    Raises RuntimeError if TRITON_INTERPRET=1 was not set from the start, or inside another such block.
    """
    if not INTERPRETED:
        raise RuntimeError("the sanitizer needs Triton's interpreter: set TRITON_INTERPRET=1 before the process starts")
    from triton.runtime import interpreter

    if hasattr(interpreter.GridExecutor.__call__, "watched"):
        raise RuntimeError("the sanitizer is watching already: use the report of the block around this one")

    report = Report()
    eyes = _Eyes(interpreter, report, backwards)
    builder = interpreter.InterpreterBuilder
    with contextlib.ExitStack() as stack:
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas"):
            stack.enter_context(replaced(builder, name, getattr(eyes, name.removeprefix("create_"))))
        stack.enter_context(replaced(builder, "create_barrier", eyes.barrier))
        stack.enter_context(replaced(builder, "set_grid_idx", eyes.begin))
        stack.enter_context(replaced(interpreter.GridExecutor, "__call__", eyes.launch))
        functions = interpreter.interpreter_builder.codegen_fns
        stack.enter_context(mock.patch.dict(functions, min_dot_size=_smallest_product()))
        stack.enter_context(_useless_until_written())
        yield report


def replaced(owner: type, name: str, instead: Any) -> contextlib.AbstractContextManager[Any]:
    """In place of a method, one that gets the method itself first."""
    plain = getattr(owner, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return instead(plain, self, *args, **options)

    method.watched = True  # pyright: ignore[reportFunctionMemberAccess]
    return mock.patch.object(owner, name, method)


def _smallest_product() -> Any:
    """The sizes below which the compiler for Hopper refuses a `tl.dot`; the interpreter takes any."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import min_dot_size

    return min_dot_size(GPUTarget("cuda", 90, 32))


@contextlib.contextmanager
def _useless_until_written() -> Iterator[None]:
    """`torch.empty` and its like give NaN and the largest integers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills: Any = torch.utils.deterministic
    filled, fills.fill_uninitialized_memory = fills.fill_uninitialized_memory, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        fills.fill_uninitialized_memory = filled


class _Access(NamedTuple):
    """What a program has touched at once.

    addresses: ascending, each once.
    lane: beside each, the only lane that has touched it; -1 if several have. The threads of a program share the one
        lane of a single number.
    shape: of the block.
    """

    program: int
    addresses: Addresses
    lane: NDArray[np.int64]
    shape: tuple[int, ...]

    def meets(self, other: _Access) -> bool:
        """Whether a lane has touched what another one did, in the other access."""
        one, two = self.addresses, other.addresses
        if not one.size or not two.size or one[-1] < two[0] or two[-1] < one[0]:
            return False
        _, here, there = np.intersect1d(one, two, assume_unique=True, return_indices=True)
        own = (self.lane[here] == other.lane[there]) & (self.lane[here] >= 0)
        return not (self.shape == other.shape and own.all()) and here.size > 0


class _Launch:
    """The accesses of one launch.

    kernel: its name.
    lows, highs: where the memory of its tensors begins and ends, ascending; what overlaps is one.
    """

    def __init__(self, kernel: str, tensors: list[Tensor], report: Report) -> None:
        self.kernel, self.report = kernel, report
        self.program = 0
        self.reads: list[_Access] = []
        self.writes: list[_Access] = []
        self.atomics: list[_Access] = []
        # Of this program since its last barrier:
        self.read: list[_Access] = []
        self.written: list[_Access] = []
        self.added: list[_Access] = []  # by atomics
        spans = _merged([_span(x) for x in tensors if x.numel()])
        self.lows = np.array([low for low, _ in spans], np.uint64)
        self.highs = np.array([high for _, high in spans], np.uint64)

    def fence(self) -> None:
        """What a program has touched so far is before what comes."""
        self.read, self.written, self.added = [], [], []

    def in_order(self, access: _Access, doing: str, **before: list[_Access]) -> None:
        """None of what came before has touched the same by other lanes."""
        for done, accesses in before.items():
            if any(access.meets(one) for one in accesses):
                self.note("order", f"{doing} behind a {done}")

    def note(self, kind: str, detail: str) -> None:
        self.report.note(kind, self.kernel, f"program {self.program}, {detail}")

    def touch(self, ptrs: Any, mask: NDArray[np.bool_], doing: str) -> tuple[_Access, NDArray[np.bool_]]:
        """An access of the lanes that a mask lets through, and the mask without those that have left the tensors."""
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        owner = np.searchsorted(self.lows, ptrs.data, side="right") - 1
        inside = owner >= 0
        if self.highs.size:
            room = self.highs[np.maximum(owner, 0)] - self.lows[np.maximum(owner, 0)]
            place = np.where(inside, ptrs.data - self.lows[np.maximum(owner, 0)], 0)  # no sum that could wrap around
            inside &= (place < room) & (room - place >= size)
        strays, tensors = int((mask & ~inside).sum()), np.unique(owner[mask & inside]).size
        if strays:
            self.note("bounds", f"{doing}: {strays} of {int(mask.sum())} lanes")
        elif tensors > 1:
            self.note("bounds", f"{doing}: lanes in {tensors} tensors")
        mask = mask & inside
        addresses, first, times = np.unique(ptrs.data[mask].astype(np.uint64), return_index=True, return_counts=True)
        alone = (times == 1) & (mask.size > 1)
        return _Access(self.program, addresses, np.where(alone, np.flatnonzero(mask)[first], -1), mask.shape), mask

    def judge(self) -> None:
        """What programs do to each other."""
        addresses, programs, plain = _flat(self.writes, self.atomics)
        if not addresses.size:
            return
        order = np.lexsort((programs, addresses))
        addresses, programs, plain = addresses[order], programs[order], plain[order]
        first = np.flatnonzero(np.r_[True, addresses[1:] != addresses[:-1]])
        several = np.minimum.reduceat(programs, first) != np.maximum.reduceat(programs, first)
        raced = several & np.logical_or.reduceat(plain, first)
        if raced.any():
            self.report.note("write race", self.kernel, f"{int(raced.sum())} addresses")
        writer = np.where(several, -1, programs[first])  # -1: several, so that any reader is another one
        places = addresses[first]
        for access in self.reads:
            at = np.minimum(np.searchsorted(places, access.addresses), places.size - 1)
            others = (places[at] == access.addresses) & (writer[at] != access.program)
            if others.any():
                detail = f"program {access.program}, {int(others.sum())} addresses"
                self.report.note("read race", self.kernel, detail)


class _Eyes:
    """What takes the place of the interpreter's own methods, and calls them."""

    def __init__(self, interpreter: Any, report: Report, backwards: bool) -> None:
        self.interpreter, self.report, self.backwards = interpreter, report, backwards
        self.current: _Launch | None = None

    def launch(self, plain: Any, executor: Any, *args: Any, **options: Any) -> None:
        tensors = [x for x in _leaves([*args, *options.values()]) if isinstance(x, Tensor)]
        if any(x.device.type != "cpu" for x in tensors):
            raise RuntimeError("the sanitizer knows addresses of tensors on a CPU alone")
        outer, self.current = self.current, _Launch(executor.fn.__name__, tensors, self.report)
        self.report.launches[self.current.kernel] += 1
        try:
            # What is useless makes NumPy complain, also in lanes that nobody looks at.
            with np.errstate(invalid="ignore"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
                plain(executor, *args, **options)
            self.current.judge()
        finally:
            self.current = outer

    def begin(self, plain: Any, builder: Any, *index: int) -> None:
        size = builder.grid_dim
        if self.backwards:
            index = tuple(count - 1 - at for at, count in zip(index, size, strict=True))
        if self.current is not None:
            self.current.program = int(np.ravel_multi_index(index, size))
            self.current.fence()
        plain(builder, *index)

    def barrier(self, plain: Any, builder: Any) -> Any:
        if self.current is not None:
            self.current.fence()
        return plain(builder)

    def masked_load(self, plain: Any, builder: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **more: Any) -> Any:
        if (launch := self.current) is not None:
            access, mask = self._touch(launch, ptrs, mask, "load")
            launch.in_order(access, "a load", store=launch.written, atomic=launch.added)
            launch.reads.append(access)
            launch.read.append(access)
            if other is None:
                other = self.interpreter.TensorHandle(self._useless(ptrs), ptrs.get_element_ty())
        return plain(builder, ptrs, mask, other, *rest, **more)

    def masked_store(self, plain: Any, builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        if (launch := self.current) is not None:
            access, mask = self._touch(launch, ptrs, mask, "store")
            launch.in_order(access, "a store", load=launch.read, store=launch.written, atomic=launch.added)
            launch.writes.append(access)
            launch.written.append(access)
            values = np.broadcast_to(value.data, ptrs.data.shape)[mask.data]
            if access.addresses.size < values.size and _disagree(ptrs.data[mask.data], values):
                launch.note("lanes", "store")
        return plain(builder, ptrs, value, mask, *rest, **more)

    def atomic_rmw(self, plain: Any, builder: Any, kind: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if (launch := self.current) is not None:
            mask = self._atomic(launch, ptrs, mask)
        return plain(builder, kind, ptrs, value, mask, *rest)

    def atomic_cas(self, plain: Any, builder: Any, ptrs: Any, *rest: Any) -> Any:
        if (launch := self.current) is not None:
            if not self._atomic(launch, ptrs, None).data.all():
                raise IndexError("a compare-and-swap beside the tensors of the launch, which no mask can keep from it")
        return plain(builder, ptrs, *rest)

    def _atomic(self, launch: _Launch, ptrs: Any, mask: Any) -> Any:
        access, mask = self._touch(launch, ptrs, mask, "atomic")
        launch.in_order(access, "an atomic", load=launch.read, store=launch.written)
        launch.atomics.append(access)
        launch.added.append(access)
        return mask

    def _touch(self, launch: _Launch, ptrs: Any, mask: Any, doing: str) -> tuple[_Access, Any]:
        """The access, and a mask that does no harm to this process."""
        lanes = np.broadcast_to(True if mask is None else mask.data, ptrs.data.shape)
        access, lanes = launch.touch(ptrs, lanes, doing)
        return access, self.interpreter.TensorHandle(lanes, self.interpreter.tl.int1)

    def _useless(self, ptrs: Any) -> NDArray[Any]:
        """What nobody can compute with, of the type that pointers point to."""
        kind = self.interpreter._get_np_dtype(ptrs.get_element_ty())
        if ptrs.get_element_ty().name == "bf16":
            return np.full(ptrs.data.shape, 0x7FC0, kind)  # bits of a NaN
        if kind.kind == "f":
            return np.full(ptrs.data.shape, np.nan, kind)
        return np.full(ptrs.data.shape, True if kind.kind == "b" else np.iinfo(kind).max, kind)


def _disagree(addresses: Addresses, values: NDArray[Any]) -> bool:
    """Whether one address is given two values."""
    order = np.argsort(addresses, kind="stable")
    same = addresses[order][1:] == addresses[order][:-1]
    one, other = values[order][1:][same], values[order][:-1][same]
    return not np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _leaves(args: Any) -> Iterator[Any]:
    """Arguments of a kernel, out of their tuples, and of a tensor descriptor the tensor."""
    for x in args:
        yield from _leaves(x) if isinstance(x, tuple | list) else [getattr(x, "base", x)]


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses from the first of a tensor's numbers to behind the last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in ascending order; those that overlap as one."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _flat(writes: list[_Access], atomics: list[_Access]) -> tuple[Addresses, NDArray[np.int64], NDArray[np.bool_]]:
    """All addresses one after the other, and beside each its program, and whether it was a plain write."""
    accesses = [*writes, *atomics]
    counts = [len(access.addresses) for access in accesses]
    programs = np.array([access.program for access in accesses], np.int64)
    addresses = np.concatenate([np.empty(0, np.uint64), *(access.addresses for access in accesses)])
    return addresses, np.repeat(programs, counts), np.repeat(np.arange(len(accesses)) < len(writes), counts)
