"""Conversion between an `Inputs` NamedTuple and the flat argument lists of custom operators and autograd functions.

An operation with many parameters declares them once, in `Inputs`.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor


def schema(kind: Any) -> str:
    """Return the schema of a custom operator with the fields of `Inputs`, or with the arguments of a function.

    Example: `Tensor query_BRHC, Tensor? bank_BFC, int width`.
    """
    hints = get_type_hints(kind)
    return ", ".join(f"{_schema_type(hint)} {name}" for name, hint in hints.items() if name != "return")


def _schema_type(hint: Any) -> str:
    kinds = get_args(hint) or (hint,)
    required = next(kind for kind in kinds if kind is not NoneType)
    return required.__name__ + ("?" if NoneType in kinds else "")


def learns(*tensors: Tensor | None) -> bool:
    """Return whether any of these needs a gradient."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def contiguous(inputs: Any) -> Any:
    """Return the inputs with contiguous tensors."""
    return inputs._make([x.contiguous() if isinstance(x, Tensor) else x for x in inputs])


def keep(ctx: Any, inputs: tuple[Any, ...], *results: Tensor | None) -> None:
    """Save inputs and some results for backward."""
    ctx.save_for_backward(*results, *[x if isinstance(x, Tensor) else None for x in inputs])
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def kept(ctx: Any, kind: Any) -> Any:
    """Return the values saved by `keep`: the inputs, as `kind`, then each result."""
    # saved_tensors is read once, because a second read fails if activations are recomputed.
    saved, count = ctx.saved_tensors, len(ctx.numbers)
    tensors = zip(saved[len(saved) - count :], ctx.numbers, strict=True)
    return kind(*(number if x is None else x for x, number in tensors)), *saved[: len(saved) - count]
