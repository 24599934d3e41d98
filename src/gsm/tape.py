"""Recording a call on a CPU: its operations, to be repeated on the same buffers without the Python between them.

A decoded token of a small model is hundreds of operations of a few microseconds each, and more Python than these. A
tape keeps the operations alone. What they make is kept too, and written again when they are repeated: so views need no
repeating, and neither does what follows from nothing that can change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsm.graphs import Call, without_autocast_cache
from gsm_kernels import native

aten = torch.ops.aten
LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # of what hands a value to the host
HANDED_OUT = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
COPIES = {aten.clone, aten._to_copy}
ANSWERED = {"dtype", "layout", "device", "pin_memory", "memory_format"}  # what a result that is there already answers


class Looked(RuntimeError):
    """A call that was to be recorded has looked at a value."""

    def __init__(self, how: object):
        super().__init__(f"{how} looks at a value while a call is recorded: all repeats would have the same one")


class NoLooks(TorchFunctionMode):
    """Refuses what hands values to the host without an operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HANDED_OUT:
            raise Looked(func)
        return func(*args, **(kwargs or {}))


class Step(NamedTuple):
    """An operation of a tape.

    Attributes:
        repeat: runs it again, on the same tensors.
        reads, writes, makes: storages that it is given, may change, and has made.
        kept: tensors that have to live as long as the tape.
        drawn: whether it draws random numbers.
    """

    repeat: Callable[[], Any]
    reads: frozenset[int]
    writes: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    kept: tuple[Any, ...] = ()
    drawn: bool = False


class Tape(TorchDispatchMode):
    """Writes down every operation of this thread, compiled loops too."""

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if LOOKS.intersection(func.tags) and not (func is aten.index.Tensor and _by_number(args[1])):
            raise Looked(func)
        out = func(*args, **kwargs)
        reads, made = _storages((args, kwargs)), _storages(out)
        if func._schema.is_mutable:
            step = Step(partial(func, *args, **kwargs), reads, writes=reads)
        elif func.overloadpacket in EMPTY or made <= reads:
            step = Step(_nothing, reads, makes=made - reads, kept=(out,))
        else:
            drawn = torch.Tag.nondeterministic_seeded in func.tags
            step = Step(_into(out, func, args, kwargs), reads, makes=made - reads, drawn=drawn)
        self.steps.append(step)
        return out

    def note(self, repeat: Callable[[], None], arguments: tuple[Any, ...]) -> None:
        """A compiled loop, which may write to whatever it is given."""
        given = _storages(arguments)
        self.steps.append(Step(repeat, given, writes=given, kept=arguments))

    def varying(self) -> list[Step]:
        """The steps but those that do nothing, or make the same from the same each time."""
        written = frozenset[int]().union(*(step.writes for step in self.steps))
        fixed: set[int] = set()
        left = []
        for step in self.steps:
            if step.makes and not step.drawn and step.reads <= fixed and not step.makes & written:
                fixed |= step.makes
            elif step.repeat is not _nothing:
                left.append(step)
        return left


class Tapes:
    """A ``gsm.graphs.Recorder`` for calls on a CPU. What repeats a call computes what it computed, bit for bit.

    Args:
        prompts, chunks, room: as of a recorder. A prompt's operations are long, so that Python costs it little; a step
            that has room for many more tokens than there are pays for them in the operations that PyTorch computes.
    """

    def __init__(self, prompts: int = 0, chunks: int = 0, room: int | None = 1024):
        self.prompts, self.chunks, self.room = prompts, chunks, room

    def __call__(self, call: Call, undo: Callable[[], None]) -> Call:
        """See ``Recorder``.

        Raises:
            Looked: if the call looks at a value.
        """
        tape = Tape()
        with without_autocast_cache(), native.notes(tape.note), NoLooks(), tape:
            result = call()
        undo()
        return Repeat(tape, result)


class Repeat:
    """What repeats a recorded call.

    Args:
        tape: what was recorded; it holds every tensor that a repeat writes to.
        result: what the call has returned.
    """

    def __init__(self, tape: Tape, result: Tensor):
        self.tape, self.result = tape, result
        self.steps = [step.repeat for step in tape.varying()]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        for repeat in self.steps:
            repeat()
        return self.result


def _by_number(indices: list[Tensor | None]) -> bool:
    """Whether none of these is a mask."""
    return not any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _nothing() -> None:
    """For a view, and for memory without contents."""


def _into(out: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """What computes an operation again, into the tensors that it has made."""
    outs: list[Tensor] = list(out) if isinstance(out, tuple | list) else [out]
    if func.overloadpacket in COPIES:
        return partial(outs[0].copy_, args[0])
    variant = _out_variant(func)
    if variant is not None:
        names = [given.name for given in variant._schema.arguments if given.is_out]
        taken = {given.name for given in variant._schema.arguments}
        rest = {name: value for name, value in kwargs.items() if name in taken}
        return partial(variant, *args, **rest, **dict(zip(names, outs, strict=True)))

    def again() -> None:
        new = func(*args, **kwargs)
        for old, value in zip(outs, new if isinstance(new, tuple | list) else (new,), strict=True):
            old.copy_(value)

    return again


@functools.cache
def _out_variant(func: OpOverload) -> OpOverload | None:
    """The overload of an operation that writes to tensors which are there already; None if it has none."""
    wanted = [_kind(given) for given in func._schema.arguments if given.name not in ANSWERED]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [given for given in other._schema.arguments if given.is_out]
        taken = [_kind(given) for given in other._schema.arguments if not given.is_out and given.name not in ANSWERED]
        if len(outs) == len(func._schema.returns) and outs and taken == wanted:
            return other
    return None


def _kind(given: torch.Argument) -> tuple[str, str]:
    return given.name, str(given.type)


def _storages(tensors: Any) -> frozenset[int]:
    """The memory below some tensors."""
    return frozenset(x.untyped_storage()._cdata for x in tree_leaves(tensors) if isinstance(x, Tensor))
