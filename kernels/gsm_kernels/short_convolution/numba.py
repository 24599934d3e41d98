"""The short convolution on a CPU by compiled loops, each one pass, which keep nothing for backward but the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import in_dtype
from ..native import loops, places, run, unfit, watched, wide

LEAST = 1 << 15  # numbers that are worth a thread
ROWS = 32  # of a block at least, for which backward adds up the gradient of the weight


def refuses(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> str | None:
    """Why this call is not for the loops."""
    return unfit(seen_BEC, weight)


def short_convolution(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    """See `gsm_kernels.short_convolution`."""
    learning = torch.is_grad_enabled() and (seen_BEC.requires_grad or weight.requires_grad)
    return (_forward if learning or watched() else _summed)(seen_BEC, weight, position_BT)


def _summed(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    given, (batch, length), (channels, width) = wide(seen_BEC), position_BT.shape, weight.shape
    out_BTC, least = given.new_empty(batch, length, channels), LEAST // max(channels, 1) + 1
    sizes = batch, length, given.shape[1], channels, width
    numbers = given, wide(weight), places(position_BT), out_BTC
    run(loops(__package__).forward, batch * length, *sizes, *numbers, least=least)
    return in_dtype(out_BTC, seen_BEC.dtype)


@torch.library.custom_op("gsm_kernels::short_convolution_cpu", mutates_args=(), device_types="cpu")
def _forward(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    return _summed(seen_BEC, weight, position_BT)


@torch.library.custom_op("gsm_kernels::short_convolution_cpu_backward", mutates_args=(), device_types="cpu")
def _backward(grad_BTC: Tensor, seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
    given, (batch, entries, channels) = [wide(one) for one in (grad_BTC, seen_BEC, weight)], seen_BEC.shape
    width = weight.shape[1]
    rows = max(ROWS, 8 * width)  # sums of blocks then take at most an eighth of the memory of what comes in
    blocks, least = -(-batch * entries // rows), LEAST // (max(channels, 1) * rows) + 1
    seen_grad_BEC, part_PWC = torch.empty_like(given[1]), given[1].new_empty(blocks, width, channels)
    sizes = rows, batch, position_BT.shape[1], entries, channels, width
    run(loops(__package__).backward, blocks, *sizes, *given, places(position_BT), seen_grad_BEC, part_PWC, least=least)
    weight_grad_CW = in_dtype(part_PWC.sum(0).T.contiguous(), weight.dtype)
    return in_dtype(seen_grad_BEC, seen_BEC.dtype), weight_grad_CW


@_forward.register_fake
def _(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    return seen_BEC.new_empty(*position_BT.shape, seen_BEC.shape[2])


@_backward.register_fake
def _(grad_BTC: Tensor, seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
    return seen_BEC.new_empty(seen_BEC.shape), weight.new_empty(weight.shape)


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad_BTC: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad_BTC, *ctx.saved_tensors), None


_forward.register_autograd(_gradients, setup_context=_keep)
