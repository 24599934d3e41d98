"""Recording of a call on a CPU as a tape of operations, to be replayed on the same buffers without Python between them.

A decoded token of a small model is hundreds of operations of a few microseconds; Python overhead takes longer than the
operations. A tape stores only the operations and their outputs, and a replay writes into these outputs. So views and
constants are not replayed.
"""

from __future__ import annotations

import functools
import operator
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
from gsm_kernels.register import notes

aten = torch.ops.aten
HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # tags of operations that read a value
HOST_FUNCTIONS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}  # functions that read values without an operation
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
COPIES = {aten.clone, aten._to_copy}
# Keyword arguments that an existing output buffer already determines.
OUTPUT_OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format"}


class HostRead(RuntimeError):
    """A call read a tensor's value on the host while it was recorded."""

    def __init__(self, how: object):
        super().__init__(f"{how} reads a value while a call is recorded, so all replays would have the same value")


class NoHostReads(TorchFunctionMode):
    """Raise HostRead for functions that read values without an operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HOST_FUNCTIONS:
            raise HostRead(func)
        return func(*args, **(kwargs or {}))


class Step(NamedTuple):
    """An operation of a tape.

    Attributes:
        replay: runs it again, on the same tensors.
        reads, writes, makes: storages of its arguments, storages that it may change, and storages of its outputs.
        tensors: tensors that must live as long as the tape.
        drawn: whether it draws random numbers.
        writes_memory: whether it writes the static memory, at the end of a call.
    """

    replay: Callable[[], Any]
    reads: frozenset[int]
    writes: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    tensors: tuple[Any, ...] = ()
    drawn: bool = False
    writes_memory: bool = False


class Tape(TorchDispatchMode):
    """Records every operation of this thread, including compiled loops."""

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if HOST_READS.intersection(func.tags) and not (func is aten.index.Tensor and _without_masks(args[1])):
            raise HostRead(func)
        out = func(*args, **kwargs)
        reads, made = _storages((args, kwargs)), _storages(out)
        if func._schema.is_mutable:
            # The operator's own function, so that no Python runs between the copies into a static memory.
            again, writes_memory = partial(func._op, *args, **kwargs), func is aten._foreach_copy_.default
            step = Step(again, reads, writes=reads, writes_memory=writes_memory)
        elif func.overloadpacket in EMPTY or made <= reads:
            step = Step(_nothing, reads, makes=made - reads, tensors=(out,))
        else:
            drawn = torch.Tag.nondeterministic_seeded in func.tags
            step = Step(_into(out, func, args, kwargs), reads, makes=made - reads, drawn=drawn)
        self.steps.append(step)
        return out

    def note(self, replay: Callable[[], None], arguments: tuple[Any, ...]) -> None:
        """Record a compiled loop, which may write to any of its arguments."""
        storages = _storages(arguments)
        self.steps.append(Step(replay, storages, writes=storages, tensors=arguments))

    def varying(self) -> list[Step]:
        """Return the steps that must be replayed: all but views and constants."""
        written = frozenset[int]().union(*(step.writes for step in self.steps))
        constant: set[int] = set()
        steps = []
        for step in self.steps:
            if step.makes and not step.drawn and step.reads <= constant and not step.makes & written:
                constant |= step.makes
            elif step.replay is not _nothing:
                steps.append(step)
        return steps


class Tapes:
    """A ``gsm.graphs.Recorder`` for calls on a CPU. A replay computes the same as the call, bit for bit.

    Args:
        prompts, chunks, room: as in ``Recorder``. Prompts are not recorded, because their operations take much longer
            than Python. A decoding step computes its whole room, so the room starts small.
    """

    def __init__(self, prompts: int = 0, chunks: int = 0, room: int | None = 1024):
        self.prompts, self.chunks, self.room = prompts, chunks, room

    def __call__(self, call: Callable[[], Tensor], undo: Callable[[], None]) -> Call:
        """See ``Recorder``.

        Raises:
            HostRead: if the call reads a value on the host.
        """
        tape = Tape()
        with without_autocast_cache(), notes(tape.note), NoHostReads(), tape:
            result = call()
        undo()
        return TapeReplay(tape, result)


class TapeReplay:
    """A replay of a recorded call.

    Args:
        tape: the recording; it holds every tensor that a replay writes to.
        result: the output of the call.

    Attributes:
        written: as in ``gsm.graphs.Call``.
    """

    written = False

    def __init__(self, tape: Tape, result: Tensor):
        self.tape, self.result = tape, result
        steps = tape.varying()
        self.steps = [step.replay for step in steps]
        writing = [number for number, step in enumerate(steps) if step.writes_memory] or [len(steps)]
        self._writing = slice(writing[0], writing[-1] + 1)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        for replay in self.steps[: self._writing.start]:
            replay()
        copies = map(operator.call, self.steps[self._writing])
        self.written = True  # Python handles no signal until the last copy is done, as in a plain call
        list(copies)
        for replay in self.steps[self._writing.stop :]:
            replay()
        return self.result


def _without_masks(indices: list[Tensor | None]) -> bool:
    """Return whether none of the indices is a mask."""
    return not any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _nothing() -> None:
    """Do nothing: the replay of a view, and of memory without contents."""


def _into(out: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that repeats an operation and writes into its original outputs."""
    outs: list[Tensor] = list(out) if isinstance(out, tuple | list) else [out]
    if func.overloadpacket in COPIES:
        return partial(outs[0].copy_, args[0])
    variant = _out_variant(func)
    if variant is not None:
        names = [argument.name for argument in variant._schema.arguments if argument.is_out]
        accepted = {argument.name for argument in variant._schema.arguments}
        rest = {name: value for name, value in kwargs.items() if name in accepted}
        return partial(variant._op, *args, **rest, **dict(zip(names, outs, strict=True)))

    def again() -> None:
        new = func(*args, **kwargs)
        for old, value in zip(outs, new if isinstance(new, tuple | list) else (new,), strict=True):
            old.copy_(value)

    return again


@functools.cache
def _out_variant(func: OpOverload) -> OpOverload | None:
    """Return the overload of an operation that writes into existing outputs; None if it has none."""
    inputs = _inputs(func)
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [argument for argument in other._schema.arguments if argument.is_out]
        if len(outs) == len(func._schema.returns) and outs and _inputs(other) == inputs:
            return other
    return None


def _inputs(func: OpOverload) -> list[tuple[str, str]]:
    """Return name and type of the arguments of an operation, without outputs and their options."""
    arguments = [argument for argument in func._schema.arguments if not argument.is_out]
    return [(argument.name, str(argument.type)) for argument in arguments if argument.name not in OUTPUT_OPTIONS]


def _storages(tensors: Any) -> frozenset[int]:
    """Return the storages of all tensors in a tree."""
    return frozenset(x.untyped_storage()._cdata for x in tree_leaves(tensors) if isinstance(x, Tensor))
