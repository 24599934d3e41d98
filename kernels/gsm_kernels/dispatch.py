"""Choose the implementation of an operation for each call, and report the choice and its reason.

An `Op` lists its implementations in order of preference, with the plain PyTorch reference last. A call runs the first
implementation that can take it; the others give a reason why they cannot. `torch.compile(fullgraph=True)` traces only
the chosen implementation.

    swiglu = Op("swiglu", reference, (Impl("triton", kernel, refuses=needs_hopper),), check=check)
    with listening() as heard:
        swiglu(gate, up, limit)
    assert heard == [("swiglu", "triton")]

An operation with many parameters declares them in a NamedTuple called `Inputs`. A call then packs its arguments into
`Inputs`, which `check`, `refuses` and the implementations take in place of the arguments.

The environment variable GSM_KERNELS and the context manager `using` force an implementation by name. "reference" and
"triton" apply to every operation. Any other name applies to the operations that have such an implementation, unless it
is `narrow`; the other operations choose as with "auto".
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
REMEMBERED = 256  # cached checks per operation; a growing bank has a new shape at every call


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class Impl:
    """One implementation of an operation.

    Attributes:
        name: "reference", "triton", ...
        fn: the function; it takes the operation's arguments, or its `Inputs`.
        refuses: takes the same arguments; returns the reason why `fn` cannot take this call, or None.
        missing: takes no arguments; returns the reason why `fn` cannot run on this machine, or None.
        narrow: a description of the calls that it is for, if these are few. Such an implementation cannot be forced by
            name, and `explain` names another one.
    """

    name: str
    fn: Callable[..., Any]
    refuses: Callable[..., str | None] = _nothing
    missing: Callable[[], str | None] = _nothing
    narrow: str | None = None


@dataclass
class Op:
    """An operation with one or more implementations, called like a function.

    Attributes:
        name: its name in `listening`, `explain` and errors.
        reference: the plain PyTorch implementation, which takes every call.
        fast: the other implementations in order of preference.
        inputs: makes `Inputs`, a NamedTuple, from a call's arguments; None: implementations take the arguments.
        check: takes the same arguments as implementations; raises ValueError if shapes do not fit. A check of `Inputs`
            may depend only on shapes and numbers, because its success is cached.
        doc: the docstring.

    Raises:
        ValueError: by a call, if its arguments do not fit.
        RuntimeError: by a call, if the forced implementation cannot take it; the message gives the reason.
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
        """Return the implementation that would run a call with these arguments.

        Raises:
            RuntimeError: if the forced implementation cannot take the call; the message gives the reason.
        """
        return self._choose(*args, **kwargs) if self.inputs is None else self._choose(self.inputs(*args, **kwargs))

    def _check_once(self, inputs: Any) -> None:
        """Check the inputs, unless inputs with the same shapes and numbers have passed before."""
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
        for impl in self.impls:  # a hundred times per decoded token, so the cached `missing` is called first
            offered = choice == "auto" or choice == impl.name
            if offered and impl.missing() is None and impl.refuses(*args, **kwargs) is None:
                return impl
        reasons = [impl.missing() or impl.refuses(*args, **kwargs) for impl in self.impls if impl.name == _forced]
        raise RuntimeError(_cannot_force(self.name, "; ".join(filter(None, reasons))))

    def explain(self) -> tuple[str, str]:
        """Return the implementation that most calls use on this machine, and the reason."""
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
        """The forced implementation if this operation has it, else "auto"."""
        if _forced in ("auto", "reference", "triton"):
            return _forced
        return _forced if any(impl.name == _forced and not impl.narrow for impl in self.impls) else "auto"


def _elsewhere(impl: Impl) -> str | None:
    """Return why most calls on this machine use another implementation, or None."""
    typical = impl.name != "numba" or _forced == "numba" or not torch.cuda.is_available()
    return impl.narrow if typical else "for tensors on the CPU"


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Force an implementation ("reference", "triton", ...) inside the block, or none ("auto"). Overrides GSM_KERNELS.

    Raises:
        ValueError: if no operation has an implementation of this name.
    """
    global _forced
    before, _forced = _forced, _validated(name, "using: name")
    try:
        yield
    finally:
        _forced = before


@contextlib.contextmanager
def listening() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that collects (operation, implementation) for every call inside the block, in order."""
    global _heard
    before, _heard = _heard, []
    try:
        yield _heard
    finally:
        _heard = before


def forced() -> str:
    """Return the implementation forced by GSM_KERNELS or `using`, or "auto"."""
    return _forced


def _validated(name: str, origin: str) -> str:
    if name not in CHOICES:
        raise ValueError(f"{origin} must be one of {', '.join(CHOICES)}, got {name!r}")
    return name


def _cannot_force(op: str, reason: str = "") -> str:
    return f"{op}: cannot run as {_forced!r}: {reason or f'no {_forced.capitalize()} kernel yet'}; set GSM_KERNELS=auto"


_forced = _validated(os.environ.get("GSM_KERNELS", "auto"), "GSM_KERNELS")
_heard: list[tuple[str, str]] | None = None
