"""Activation checkpointing for one function: save only its arguments, and compute it again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .device import full_precision, handed_out, once
from .inputs import keep, kept


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return `function(*arguments)`, saving only the arguments for backward, which calls the function again.

    Under `torch.compile`, the compiler chooses which tensors to save.
    """
    return function(*arguments) if torch.compiler.is_compiling() else _Recomputed.apply(function, *arguments)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *arguments):
        ctx.function = function
        keep(ctx, arguments)
        return handed_out(function(*arguments))

    @staticmethod
    @once
    def backward(ctx, grad):
        (arguments,) = kept(ctx, lambda *arguments: arguments)
        wanted = ctx.needs_input_grad[1:]
        leaves = [x.detach().requires_grad_() if wants else x for x, wants in zip(arguments, wanted, strict=True)]
        with torch.enable_grad(), full_precision(grad):
            learned = [x for x, wants in zip(leaves, wanted, strict=True) if wants]
            grads = iter(torch.autograd.grad(ctx.function(*leaves), learned, grad, materialize_grads=True))
        return None, *(next(grads) if wants else None for wants in wanted)
