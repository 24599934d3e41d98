"""Register functions that PyTorch cannot trace (launches, loops on addresses) as custom operators.

    swiglu = register("swiglu", forward, backward=backward, learned=("gate", "up"))

`torch.compile`, activation checkpointing and the profiler then see one operator.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .device import full_precision, once
from .inputs import keep, kept, learns, schema
from .inverse import keeping

Function = Callable[..., Any]
_thread = threading.local()  # its attribute `note` is the function given to `notes`


def register(
    name: str,
    forward: Function,
    fake: Function | None = None,
    backward: Function | None = None,
    *,
    learned: tuple[str, ...] = (),
    takes: Any = None,
    outputs: int = 1,
    results: int = 1,
    saved: int = 0,
    on_cpu: bool = False,
) -> Function:
    """Register the operator `gsm_kernels::name`, or `gsm_kernels::name_cpu` for CPUs, and return a function to call it.

    Args:
        name: name of the operator.
        forward: takes the arguments; returns the results, then tensors for backward.
        fake: takes the arguments; returns uninitialised tensors like those of `forward`. None: one tensor like the
            first argument.
        backward: takes gradients of the results, then the saved outputs, then the arguments; returns a gradient for
            each name in `learned`, an empty tensor if that argument is None. Its own derivative raises RuntimeError.
        learned: names of the arguments that get a gradient.
        takes: the `Inputs` or the schema of the arguments; None: from the annotations of `forward`.
        outputs: number of tensors that `forward` returns.
        results: how many of the first outputs are results, which autograd differentiates.
        saved: how many of the last outputs are saved for backward.
        on_cpu: register for CPUs. Calls without gradients then run `forward` directly, unless they are `watched`,
            because PyTorch's dispatcher would take longer than the operation for one decoded token.
    """
    parameters = takes if isinstance(takes, str) else schema(takes or forward)
    fake = fake or _like_first
    names = [parameter.split()[1] for parameter in parameters.split(", ")]
    options: dict[str, Any] = {"mutates_args": (), "device_types": "cpu" if on_cpu else None}
    full_name = f"gsm_kernels::{name}_cpu" if on_cpu else f"gsm_kernels::{name}"
    op = torch.library.custom_op(full_name, forward, schema=f"({parameters}) -> {_tensors(outputs)}", **options)
    op.register_fake(fake)
    if backward is not None:
        first = "".join(f"Tensor before{number}, " for number in range(results + saved))
        shape = f"({first}{parameters}) -> {_tensors(len(learned))}"
        back = torch.library.custom_op(f"{full_name}_backward", backward, schema=shape, **options)
        back.register_fake(lambda *arguments: _like_learned(arguments[results + saved :], names, learned))

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)  # no zeros for outputs that are not results
            keep(ctx, inputs, *(output[outputs - saved :] if saved else ()))

        op.register_autograd(_gradients_by(back, fake, names, learned, results), setup_context=save)
    places = [names.index(argument) for argument in learned]
    defaults = {name: one.default for name, one in inspect.signature(forward).parameters.items()}

    @functools.wraps(forward)
    def call(*arguments: Any, **named: Any) -> Any:
        """Call the operator, or on a CPU `forward` itself if no gradient and no observer needs the operator.

        Raises:
            TypeError: if a keyword is unknown, or an argument is given twice.
        """
        if named or len(arguments) < len(names):
            missing = names[len(arguments) :]
            if any(argument not in missing for argument in named):
                raise TypeError(
                    f"{full_name} takes {', '.join(names)}; got {len(arguments)} by position and {', '.join(named)}"
                )
            arguments += tuple([named[name] if name in named else defaults[name] for name in missing])
        learning = learns(*[arguments[place] for place in places])
        if on_cpu:
            return (op if learning or watched() else forward)(*arguments)
        return op(*arguments)

    return call


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _like_learned(arguments: tuple[Any, ...], names: list[str], learned: tuple[str, ...]) -> Any:
    """Return uninitialised gradients of the arguments in `learned`, empty for an argument that is None."""
    empty = next(x for x in arguments if isinstance(x, Tensor)).new_empty(0)
    by_name = dict(zip(names, arguments, strict=True))
    tensors = (empty if by_name[name] is None else by_name[name] for name in learned)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def _gradients_by(back: Function, fake: Function, names: list[str], learned: tuple[str, ...], results: int) -> Function:
    """Return the backward that autograd calls: it returns a gradient for each argument, or None."""

    @once
    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return a gradient for each argument of the operator; None for those without one. The gradient of an unused
        result is passed to `back` as zeros."""
        arguments, *tensors = kept(ctx, lambda *inputs: inputs)
        grads = grads[:results]
        if any(grad is None for grad in grads):
            empty = fake(*arguments)
            grads = tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(empty, grads, strict=False))
        with full_precision(arguments[0]), keeping():
            by_name = dict(zip(learned, back(*grads, *tensors, *arguments), strict=True))
        named = zip(names, arguments, strict=True)
        return tuple(by_name.get(name) if isinstance(x, Tensor) else None for name, x in named)

    return gradients


def watched() -> bool:
    """Return whether something observes operators: a compiler, selective checkpointing, or fake tensors.

    A compiled loop must then run as an operator, because its writes through addresses are invisible to an observer.
    The dispatch mode of `notes` does not count, because it is told of each loop.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > noted()


def noted() -> bool:
    """Return whether this thread is inside `notes`."""
    return getattr(_thread, "note", None) is not None


def take_note(repeat: Callable[[], None], arguments: tuple[Tensor | float, ...]) -> None:
    """Pass a function that repeats a loop, and the loop's arguments, to the function given to `notes`, if any."""
    if noted():
        _thread.note(repeat, arguments)


@contextmanager
def notes(note: Callable[[Callable[[], None], tuple[Tensor | float, ...]], None]) -> Iterator[None]:
    """Call `note(repeat, arguments)` for each compiled loop that this thread runs inside the block.

    A dispatch mode that records a call needs this, because it sees operators but not loops. `repeat()` runs the loop
    again on the same tensors; keep `arguments` alive as long as it may be called.
    """
    before, _thread.note = getattr(_thread, "note", None), note
    try:
        yield
    finally:
        _thread.note = before
