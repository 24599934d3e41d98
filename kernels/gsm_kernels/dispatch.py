"""Choose the implementation of an operation, and report the choice and the reasons against the others.

An `Op` has its implementations in order of preference, the plain PyTorch reference last. Each may refuse a call with a
reason; the first that does not refuse runs. Each call chooses, without a lock, so that `torch.compile(fullgraph=True)`
traces a call as if the chosen implementation had been called directly.

    swiglu = Op("swiglu", reference, (Impl("triton", kernel, refuses=needs_hopper),), check=check)
    with listening() as heard:
        swiglu(gate, up, limit)
    assert heard == [("swiglu", "triton")]

An operation with many parameters declares them once, in a NamedTuple called `Inputs`. A call then makes one of these,
and check, refusals and implementations take it in place of the arguments.

The environment variable GSM_KERNELS (auto, reference, or the name of another implementation) and the context manager
`using` force a choice. "reference" and "triton" are forced on every operation. Any other name is forced on operations
with such an implementation for all kinds of calls; the other operations choose as with auto.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .device import full_precision

CHOICES = ("auto", "reference", "triton", "numba", "sdpa", "xformers", "chunked", "fla", "grouped_mm")
REMEMBERED = 256  # cached checks per operation; a growing bank needs new ones all the time


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class Impl:
    """One implementation of an operation.

    Attributes:
        name: "reference", "triton", ...
        fn: the callable; it takes the operation's arguments, or its `Inputs`.
        refuses: takes the same arguments; returns the reason why it cannot take this call, or None.
        missing: takes nothing; returns the reason why it can take no call on this machine, or None.
        narrow: the calls that it is for, if these are few; it is then neither forced nor named by `explain`.
    """

    name: str
    fn: Callable[..., Any]
    refuses: Callable[..., str | None] = _nothing
    missing: Callable[[], str | None] = _nothing
    narrow: str | None = None


@dataclass
class Op:
    """An operation with one or more implementations; call it like the function it names.

    Attributes:
        name: its name in `listening`, `explain` and errors.
        reference: the plain PyTorch implementation. It refuses no call.
        fast: the other implementations in order of preference.
        inputs: makes `Inputs`, a NamedTuple, from a call's arguments; None: implementations take the arguments.
        check: takes the same arguments as implementations; raises ValueError if shapes do not fit. A check of `Inputs`
            may depend only on shapes and numbers, because its result is cached.
        doc: the docstring.
    """

    name: str
    reference: Callable[..., Any]
    fast: tuple[Impl, ...] = ()
    inputs: Callable[..., Any] | None = None
    check: Callable[..., object] = _nothing
    doc: str | None = None

    def __post_init__(self) -> None:
        self.__doc__ = self.doc
        self.__name__ = self.name
        self.impls = (*self.fast, Impl("reference", self.reference))
        self._checked: set[Hashable] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inputs is None:
            first = args[0] if args else next(iter(kwargs.values()))
            self.check(*args, **kwargs)
        else:
            inputs = self.inputs(*args, **kwargs)
            args, kwargs, first = (inputs,), {}, inputs[0]
            self._check_once(inputs)
        impl = self._choose(*args, **kwargs)
        with full_precision(first):
            result = impl.fn(*args, **kwargs)
        if _heard is not None:
            _heard.append((self.name, impl.name))
        return result

    def add(self, impl: Impl, before: str | None = None) -> None:
        """Add an implementation before the one named `before`, or before the reference."""
        place = next((number for number, other in enumerate(self.fast) if other.name == before), len(self.fast))
        self.fast = (*self.fast[:place], impl, *self.fast[place:])
        self.impls = (*self.fast, self.impls[-1])

    def choose(self, *args: Any, **kwargs: Any) -> Impl:
        """Return the implementation that runs a call with these arguments.

        Raises:
            RuntimeError: if a forced implementation refuses; the message has the operation and the reason.
        """
        return self._choose(*args, **kwargs) if self.inputs is None else self._choose(self.inputs(*args, **kwargs))

    def _check_once(self, inputs: Any) -> None:
        """Check the inputs, unless inputs with the same shapes and numbers have been checked."""
        if torch.compiler.is_compiling():
            self.check(inputs)
            return
        shapes = tuple([x.shape if isinstance(x, Tensor) else x for x in inputs])
        if shapes not in self._checked:
            self.check(inputs)
            if len(self._checked) >= REMEMBERED:
                self._checked.clear()
            self._checked.add(shapes)

    def _choose(self, *args: Any, **kwargs: Any) -> Impl:
        choice = self._choice
        for impl in self.impls:  # runs a hundred times per decoded token, so the cached `missing` comes first
            offered = choice == "auto" or choice == impl.name
            if offered and impl.missing() is None and impl.refuses(*args, **kwargs) is None:
                return impl
        reasons = [impl.missing() or impl.refuses(*args, **kwargs) for impl in self.impls if impl.name == _forced]
        raise RuntimeError(_cannot_force(self.name, "; ".join(filter(None, reasons))))

    def explain(self) -> tuple[str, str]:
        """Return the implementation that runs calls on this machine, as far as known without arguments, and the
        reason."""
        if _forced == "reference":
            return "reference", "forced"
        if not self.fast:
            reason = "no Triton kernel yet"
            return ("none", _cannot_force(self.name)) if _forced == "triton" else ("reference", reason)
        absent = {impl.name: impl.missing() or _elsewhere(impl) for impl in self.fast}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items() if reason)
        for impl in self.fast:
            if self._choice in ("auto", impl.name) and absent[impl.name] is None:
                return impl.name, reasons or "first choice on this machine"
        return ("none", _cannot_force(self.name, reasons)) if self._choice != "auto" else ("reference", reasons)

    @property
    def _choice(self) -> str:
        """The choice in force for this operation."""
        if _forced in ("auto", "reference", "triton"):
            return _forced
        return _forced if any(impl.name == _forced and not impl.narrow for impl in self.impls) else "auto"


def _elsewhere(impl: Impl) -> str | None:
    """Return why an implementation is not representative of this machine, although it can take calls, or None."""
    typical = impl.name != "numba" or _forced == "numba" or not torch.cuda.is_available()
    return impl.narrow if typical else "for tensors on the CPU"


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Force an implementation ("reference", "triton", ...) or none ("auto") inside the block.

    It overrides GSM_KERNELS.
    """
    global _forced
    before, _forced = _forced, _validated(name, "using(...)")
    try:
        yield
    finally:
        _forced = before


@contextlib.contextmanager
def listening() -> Iterator[list[tuple[str, str]]]:
    """Collect (operation, implementation) for every call inside the block, in order."""
    global _heard
    before, _heard = _heard, []
    try:
        yield _heard
    finally:
        _heard = before


def forced() -> str:
    """Return the choice in force: "auto", or the implementation forced by GSM_KERNELS or `using`."""
    return _forced


def _validated(name: str, origin: str) -> str:
    if name not in CHOICES:
        raise ValueError(f"{origin}: {name!r} is no implementation. Use {', '.join(CHOICES)}")
    return name


def _cannot_force(op: str, reason: str = "") -> str:
    return f"{op}: cannot run as {_forced!r}: {reason or f'no {_forced.capitalize()} kernel yet'}; set GSM_KERNELS=auto"


_forced = _validated(os.environ.get("GSM_KERNELS", "auto"), "GSM_KERNELS")
_heard: list[tuple[str, str]] | None = None
