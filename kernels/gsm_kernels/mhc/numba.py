"""The hyper-connections on a CPU: compiled loops, and matrix products by PyTorch.

Kept for backward: the inputs, and a token's numbers and inverse rms (100 bytes for four streams). Sinkhorn's divisors
are computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..device import full_precision, in_dtype
from ..inputs import keep, kept, schema
from ..native import loops, run, unfit, watched, wide
from .inputs import Inputs

STREAMS = 4
LEAST = 64  # tokens that are worth a thread


def refuses(inputs: Inputs) -> str | None:
    """Why this call is not for the loops."""
    if inputs.streams_BRXD.shape[2] != STREAMS:
        return f"made for {STREAMS} streams, got {inputs.streams_BRXD.shape[2]}"
    return unfit(*inputs[:5])


def mhc_boundary(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.mhc`."""
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:5])
    # The dispatcher that a custom operator goes through takes longer than the operation for a decoded token.
    through = _forward if learning or watched() else _left
    return through(*inputs)[:2]


def _left(streams_BRXD, update_BRD, phi, bias, scale, rounds, eps, hc_eps):
    """Both results, and what backward needs of a token: numbers and inverse rms."""
    streams, update, phi, bias, scale = map(wide, (streams_BRXD, update_BRD, phi, bias, scale))
    tokens, width = update.shape[:2].numel(), update.shape[2]
    number = linear(streams.view(tokens, STREAMS * width), phi)
    inverse, left, mixed = number.new_empty(tokens), torch.empty_like(streams), torch.empty_like(update)
    sizes, given = (tokens, width, rounds, eps, hc_eps), (streams, update, bias, scale, number, inverse)
    run(loops(__package__).forward, tokens, *sizes, *given, left, mixed, least=LEAST)
    return in_dtype(left, streams_BRXD.dtype), in_dtype(mixed, streams_BRXD.dtype), number, inverse


INPUTS = schema(Inputs)


@torch.library.custom_op(
    "gsm_kernels::mhc_boundary_cpu",
    mutates_args=(),
    device_types="cpu",
    schema=f"({INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*arguments):
    return _left(*arguments)


@torch.library.custom_op(
    "gsm_kernels::mhc_boundary_cpu_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor left_grad, Tensor mixed_grad, Tensor number, Tensor inverse, {INPUTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(left_grad, mixed_grad, number, inverse, *arguments):
    """The gradients of the five tensors among the inputs."""
    *_, rounds, _, hc_eps = arguments
    streams, update, phi, bias, scale, *grads = map(wide, (*arguments[:5], left_grad, mixed_grad))
    tokens, width = inverse.numel(), update.shape[-1]
    logit_grad, number_grad = torch.empty_like(number), torch.empty_like(number)
    streams_grad, update_grad = torch.empty_like(streams), torch.empty_like(update)
    sizes, given = (tokens, width, rounds, hc_eps), (streams, update, bias, scale, number, inverse, *grads)
    found = (logit_grad, number_grad, streams_grad, update_grad)
    run(loops(__package__).backward, tokens, *sizes, *given, *found, least=LEAST)
    streams_grad.view(tokens, STREAMS * width).addmm_(number_grad, phi)
    phi_grad = number_grad.T @ streams.view(tokens, STREAMS * width)
    read, write, mix = (logit_grad * number).sum(0).split((STREAMS, STREAMS, STREAMS * STREAMS))
    scale_grad = torch.stack((read.sum(), write.sum(), mix.sum()))
    results = (streams_grad, update_grad, phi_grad, logit_grad.sum(0), scale_grad)
    return tuple(grad.to(x.dtype) for grad, x in zip(results, arguments, strict=False))


@_forward.register_fake
def _(streams, update, phi, *_):
    tokens, whole = streams.shape[:2].numel(), torch.contiguous_format
    number = streams.new_empty(tokens, phi.shape[0], dtype=torch.float32)
    mixed = torch.empty_like(update, dtype=streams.dtype, memory_format=whole)
    return torch.empty_like(streams, memory_format=whole), mixed, number, number.new_empty(tokens)


@_backward.register_fake
def _(left_grad, mixed_grad, number, inverse, *arguments):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:5])


def _keep(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    keep(ctx, inputs, *output[2:])
    ctx.set_materialize_grads(False)  # the last two outputs have no gradient, and need no zeros for one


def _gradients(ctx, left_grad: Tensor | None, mixed_grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    inputs, *results = kept(ctx, Inputs)
    left_grad = torch.zeros_like(inputs.streams_BRXD) if left_grad is None else left_grad
    mixed_grad = torch.zeros_like(inputs.update_BRD) if mixed_grad is None else mixed_grad
    with full_precision(left_grad):
        return *_backward(left_grad, mixed_grad, *results, *inputs), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
