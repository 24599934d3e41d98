"""The hyper-connections on a CPU, by compiled loops and PyTorch's matrix products.

Saved for backward are the inputs, and each token's numbers and inverse rms (100 bytes for four streams). Sinkhorn's
divisors are computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..device import in_dtype
from ..dispatch import Impl
from ..mhc import mhc_boundary as operation
from ..mhc.inputs import LEARNED, Inputs
from ..register import register
from .native import loops, missing, run, unfit, wide

STREAMS = 4  # supported number of streams
LEAST = 64  # tokens per thread, at least


def refuses(inputs: Inputs) -> str | None:
    """Return why the loops cannot take this call, or None."""
    if inputs.streams_BRXD.shape[2] != STREAMS:
        return f"made for {STREAMS} streams, got {inputs.streams_BRXD.shape[2]}"
    return unfit(*inputs[:5])


def mhc_boundary(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.mhc`."""
    return _operator(*inputs)[:2]


def _forward(streams_BRXD, update_BRD, phi, bias, scale, rounds, eps, hc_eps):
    """Return both results, and each token's numbers and inverse rms for backward."""
    streams, update, phi, bias, scale = map(wide, (streams_BRXD, update_BRD, phi, bias, scale))
    tokens, width = update.shape[:2].numel(), update.shape[2]
    number = linear(streams.view(tokens, STREAMS * width), phi)
    inverse, left, mixed = number.new_empty(tokens), torch.empty_like(streams), torch.empty_like(update)
    sizes, inputs = (tokens, width, rounds, eps, hc_eps), (streams, update, bias, scale, number, inverse)
    run(loops("mhc").forward, tokens, *sizes, *inputs, left, mixed, least=LEAST)
    return in_dtype(left, streams_BRXD.dtype), in_dtype(mixed, streams_BRXD.dtype), number, inverse


def _backward(left_grad, mixed_grad, number, inverse, *arguments):
    """Return the gradients of streams, update, phi, bias and scale."""
    *_, rounds, _, hc_eps = arguments
    streams, update, phi, bias, scale, *grads = map(wide, (*arguments[:5], left_grad, mixed_grad))
    tokens, width = inverse.numel(), update.shape[-1]
    logit_grad, number_grad = torch.empty_like(number), torch.empty_like(number)
    streams_grad, update_grad = torch.empty_like(streams), torch.empty_like(update)
    sizes, inputs = (tokens, width, rounds, hc_eps), (streams, update, bias, scale, number, inverse, *grads)
    gradients = (logit_grad, number_grad, streams_grad, update_grad)
    run(loops("mhc").backward, tokens, *sizes, *inputs, *gradients, least=LEAST)
    streams_grad.view(tokens, STREAMS * width).addmm_(number_grad, phi)
    phi_grad = number_grad.T @ streams.view(tokens, STREAMS * width)
    read, write, mix = (logit_grad * number).sum(0).split((STREAMS, STREAMS, STREAMS * STREAMS))
    scale_grad = torch.stack((read.sum(), write.sum(), mix.sum()))
    results = (streams_grad, update_grad, phi_grad, logit_grad.sum(0), scale_grad)
    return tuple(grad.to(x.dtype) for grad, x in zip(results, arguments, strict=False))


def _results(streams, update, phi, *_):
    tokens, whole = streams.shape[:2].numel(), torch.contiguous_format
    number = streams.new_empty(tokens, phi.shape[0], dtype=torch.float32)
    mixed = torch.empty_like(update, dtype=streams.dtype, memory_format=whole)
    return torch.empty_like(streams, memory_format=whole), mixed, number, number.new_empty(tokens)


RETURNS = {"takes": Inputs, "learned": LEARNED, "outputs": 4, "results": 2, "saved": 2}
_operator = register("mhc_boundary", _forward, _results, _backward, on_cpu=True, **RETURNS)

operation.add(Impl("numba", mhc_boundary, refuses, missing))
