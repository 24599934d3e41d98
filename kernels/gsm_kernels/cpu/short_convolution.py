"""The short convolution on a CPU by compiled loops, each one pass, which keep nothing for backward but the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import in_dtype
from ..dispatch import Impl
from ..register import register
from ..short_convolution import short_convolution as operation
from .native import loops, missing, places, run, unfit, wide

LEAST = 1 << 15  # numbers that are worth a thread
ROWS = 32  # fewest rows of a block; backward adds up the weight's gradient by block


def _forward(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    entries, (batch, length), (channels, width) = wide(seen_BEC), position_BT.shape, weight.shape
    out_BTC, least = entries.new_empty(batch, length, channels), LEAST // max(channels, 1) + 1
    sizes = batch, length, entries.shape[1], channels, width
    numbers = entries, wide(weight), places(position_BT), out_BTC
    run(loops("short_convolution").forward, batch * length, *sizes, *numbers, least=least)
    return in_dtype(out_BTC, seen_BEC.dtype)


def _backward(grad_BTC: Tensor, seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
    inputs, (batch, entries, channels) = [wide(tensor) for tensor in (grad_BTC, seen_BEC, weight)], seen_BEC.shape
    width = weight.shape[1]
    rows = max(ROWS, 8 * width)  # sums of blocks then take at most an eighth of the memory of the inputs
    blocks, least = -(-batch * entries // rows), LEAST // (max(channels, 1) * rows) + 1
    seen_grad_BEC, part_PWC = torch.empty_like(inputs[1]), inputs[1].new_empty(blocks, width, channels)
    sizes = rows, batch, position_BT.shape[1], entries, channels, width
    tensors = (*inputs, places(position_BT), seen_grad_BEC, part_PWC)
    run(loops("short_convolution").backward, blocks, *sizes, *tensors, least=least)
    weight_grad_CW = in_dtype(part_PWC.sum(0).T.contiguous(), weight.dtype)
    return in_dtype(seen_grad_BEC, seen_BEC.dtype), weight_grad_CW


def _shape(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    return seen_BEC.new_empty(*position_BT.shape, seen_BEC.shape[2])


short_convolution = register(
    "short_convolution", _forward, _shape, _backward, learned=("seen_BEC", "weight"), on_cpu=True
)

operation.add(Impl("numba", short_convolution, unfit, missing))
