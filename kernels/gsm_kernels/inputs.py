"""Convert an `Inputs` NamedTuple to the flat argument lists of custom operators and autograd functions, and back."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor


def schema(kind: Any) -> str:
    """Return the schema of a custom operator, from the fields of `Inputs` or the arguments of a function.

    Example: `Tensor query_BRHC, Tensor? bank_BFC, int width`.
    """
    hints = get_type_hints(kind)
    return ", ".join(f"{_schema_type(hint)} {name}" for name, hint in hints.items() if name != "return")


def _schema_type(hint: Any) -> str:
    kinds = get_args(hint) or (hint,)
    required = next(kind for kind in kinds if kind is not NoneType)
    return required.__name__ + ("?" if NoneType in kinds else "")


def learns(*tensors: Tensor | None) -> bool:
    """Return whether any of these tensors needs a gradient, and gradients are enabled."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def contiguous(inputs: Any) -> Any:
    """Return the inputs (a NamedTuple) with all tensors contiguous."""
    return inputs._make([x.contiguous() if isinstance(x, Tensor) else x for x in inputs])


def keep(ctx: Any, inputs: tuple[Any, ...], *results: Tensor | None) -> None:
    """Save inputs (tensors, numbers and None) and some results in `ctx` for backward."""
    ctx.save_for_backward(*results, *[x if isinstance(x, Tensor) else None for x in inputs])
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def kept(ctx: Any, kind: Any) -> Any:
    """Return the values saved by `keep`: `kind(*inputs)`, then each result."""
    # saved_tensors is read once, because a second read fails under activation checkpointing.
    saved, count = ctx.saved_tensors, len(ctx.numbers)
    tensors = zip(saved[len(saved) - count :], ctx.numbers, strict=True)
    return kind(*(number if x is None else x for x, number in tensors)), *saved[: len(saved) - count]
