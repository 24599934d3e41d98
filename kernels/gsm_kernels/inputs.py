"""One value for all inputs of an operation, where PyTorch takes a flat list: custom operators and autograd functions.

An operation with many parameters declares them once, in a NamedTuple `Inputs`.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_type_hints

from torch import Tensor


def schema(kind: type) -> str:
    """The parameters of a custom operator that takes these inputs: `Tensor query_BRHC, Tensor? bank_BFC, int width`."""
    return ", ".join(f"{_schema_type(hint)} {name}" for name, hint in get_type_hints(kind).items())


def _schema_type(hint: Any) -> str:
    kinds = get_args(hint) or (hint,)
    given = next(kind for kind in kinds if kind is not NoneType)
    return given.__name__ + ("?" if NoneType in kinds else "")


def contiguous(inputs: Any) -> Any:
    """The same inputs, each tensor without gaps, as kernels read it."""
    return inputs._make([x.contiguous() if isinstance(x, Tensor) else x for x in inputs])


def keep(ctx: Any, inputs: tuple[Any, ...], *results: Tensor | None) -> None:
    """Save inputs and some results for backward."""
    ctx.save_for_backward(*results, *[x if isinstance(x, Tensor) else None for x in inputs])
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def kept(ctx: Any, kind: Any) -> Any:
    """What `keep` has saved: the inputs, as `kind`, then each result."""
    saved, count = (
        ctx.saved_tensors,
        len(ctx.numbers),
    )  # read once: a second read fails where activations are recomputed
    tensors = zip(saved[len(saved) - count :], ctx.numbers, strict=True)
    return kind(*(number if x is None else x for x, number in tensors)), *saved[: len(saved) - count]


def gradients(kind: Any, **grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients by the names of their inputs, in the order of the inputs; None for all others."""
    return tuple([grads.get(name) for name in kind._fields])
