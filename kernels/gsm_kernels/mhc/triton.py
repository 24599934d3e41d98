"""The hyper-connections as one kernel forward, two for few tokens, and four backward.

Forward sweeps twice over a tile's streams; the second sweep finds most of them in the L2 cache. In smaller tiles phi
would be read too often, because every program reads all of it.

A tile of up to 64 tokens, as in decoding, would be one program that goes through phi alone. So there the columns of phi
are divided among up to 64 programs (`project`), and those of the streams among others (`finish`), which all make the
coefficients of their token again, in registers: two launches, no round trip within one, and no copy of phi in bfloat16.
With a larger FEW, more tokens are computed in this way: undivided, as two streaming kernels that read the streams twice
but never wait for Sinkhorn's rounds between the reads. Only a GPU can say from how many tokens one kernel is faster.

In backward, the gradient of a stream needs that of its token's coefficients, which takes whole rows, and the gradient
of phi takes whole columns. So one kernel goes by rows, a small one through the coefficients, and one by columns, which
holds its part of phi's gradient in registers while the tokens pass. A fourth adds up the partial sums of all three
parameters, in their order, with no atomics. The streams that left are not read: with g the gradient of the next site's
input, <g, X'_k> follows from the products of g with the streams that entered.

Kept for backward: the inputs and, in float32, a token's numbers, coefficients and inverse rms. Sinkhorn's divisors are
computed again, in registers.

Streams in bfloat16 are multiplied with phi rounded to bfloat16, as autocast would; float16 ones in TF32, and float32
ones as three products in TF32, which keep float32's precision on the matrix units. All sums and coefficients are
float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..inputs import contiguous
from ..launch import cdiv, launch, power_of_two, unfit
from ..register import register
from ..tiles import Tile, launch_fastest
from .inputs import LEARNED, Inputs

STREAMS = (1, 2, 4, 8)
MOST_ROUNDS = 32  # they are unrolled in backward
TILE = 16  # tokens: the rows of the smallest product of matrices
FEW = 4  # tiles of tokens that two kernels compute, since one would leave most processors idle
FEWEST = 4  # tokens of a program of `finish`
PROGRAMS = 64  # that share their columns
LEAST_STEPS = 4  # tiles of columns that are worth a second launch
SPLITS = 16  # of the tokens, for the gradient of phi: with 64 columns a program, two rounds of two on every processor


def refuses(inputs: Inputs) -> str | None:
    """Return why this call is not for the kernels."""
    if inputs.streams_BRXD.shape[2] not in STREAMS:
        return f"made for {', '.join(map(str, STREAMS))} streams, got {inputs.streams_BRXD.shape[2]}"
    if inputs.rounds > MOST_ROUNDS:
        return f"made for at most {MOST_ROUNDS} rounds, got {inputs.rounds}"
    return unfit(*inputs[:5])


class Blocks(NamedTuple):
    """How the kernels cut their work.

    Attributes:
        width: columns of a tile of `products`, 8 tokens: 8 numbers of every stream in a thread's registers. A tile of
            `forward`, 16 tokens, has half of these columns: 100 registers a thread in bfloat16, not 227, so that a
            processor has two programs, one of which loads while the other normalises.
        column: columns of a program of `stream_gradients`: with four streams, 64 of the sums for phi a thread.
        warps: of `stream_gradients`.
        padded: numbers of a token, as a power of two that a matrix product can have.
        precision: how the products are multiplied if not in bfloat16; three products give float32's own precision.
    """

    width: int
    column: int
    warps: int
    padded: int
    precision: str


def _tile(width: int, warps: int, stages: int) -> Tile:
    return ("WIDTH", width), ("num_warps", warps), ("num_stages", stages)


def blocks(streams_BRXD: Tensor) -> Blocks:
    """Sized for four streams in 16 bits, and smaller where there are more or wider numbers."""
    streams, width = streams_BRXD.shape[2:]
    wide, many = streams_BRXD.dtype == torch.float32, streams > 4
    padded = power_of_two(2 * streams + streams**2, 16)
    whole = power_of_two(width, 16)
    tile, column = min(256 >> (wide + many), whole), min(64 >> (wide + many), whole)
    return Blocks(tile, column, 8 if many else 4, padded, "tf32x3" if wide else "tf32")


def mhc_boundary(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.mhc`."""
    return _operator(*inputs)[:2]


def _forward(*arguments):
    """Both results, and what backward needs of a token: numbers, inverse rms and coefficients."""
    from .kernels import forward

    inputs = contiguous(Inputs(*arguments))
    left, mixed, number, inverse, coefficient = results = _results(*arguments)
    count, width, tokens, tile = *inputs.streams_BRXD.shape[2:], inverse.numel(), blocks(inputs.streams_BRXD)
    streams, update, phi, bias, scale, rounds, eps, hc_eps = inputs
    if shares := shares_of(streams):
        _few_tokens(shares, inputs, results)
        return results
    tensors = (streams, update, _operand(phi, streams), bias, scale, left, mixed, number, inverse, coefficient)
    arguments = (*tensors, tokens, width, rounds, eps, hc_eps)
    sizes = {"X": count, "TOKENS": TILE, "PADDED": tile.padded, "PRECISION": tile.precision}
    candidates, programs = (_tile(max(tile.width // 2, TILE), 8, 5), _tile(tile.width, 8, 3)), cdiv(tokens, TILE)
    launch_fastest("mhc.forward", forward, lambda _: (programs,), arguments, candidates, **sizes)
    return results


def shares_of(streams_BRXD: Tensor) -> int:
    """Among how many programs the columns of a tile of few tokens are divided; 0: one kernel does it all."""
    batch, rows, count, width = streams_BRXD.shape
    tiles, steps = cdiv(batch * rows, TILE), cdiv(count * width, blocks(streams_BRXD).width)
    if not 0 < tiles <= FEW or steps < LEAST_STEPS:
        return 0
    return 1 << (min(max(PROGRAMS // tiles, 1), steps).bit_length() - 1)  # a power of two, which a block has to have


def _few_tokens(shares: int, inputs: Inputs, results: tuple[Tensor, ...]) -> None:
    """Write the results of `forward`, in two kernels, for few tokens with many programs for every tile."""
    from .kernels import finish, project

    streams, update, phi, bias, scale, rounds, eps, hc_eps = inputs
    left, mixed, number, inverse, coefficient = results
    count, width, tokens, tile = *streams.shape[2:], inverse.numel(), blocks(streams)
    parts = number.new_empty(shares, *number.shape), number.new_empty(shares, tokens)
    columns = cdiv(cdiv(count * width, tile.width), shares) * tile.width
    sizes = {"TOKENS": TILE, "WIDTH": tile.width, "PADDED": tile.padded, "PRECISION": tile.precision}
    grid = (cdiv(tokens, TILE), shares)
    launch(project, grid, streams, phi, *parts, tokens, count * width, columns, C=number.shape[1], **sizes)
    tensors = (streams, update, *parts, bias, scale, left, mixed, number, inverse, coefficient)
    few, mixed_columns = power_of_two(min(tokens, FEWEST)), tile.width if shares > 1 else width
    sizes, numbers = {"X": count, "TOKENS": few, "WIDTH": tile.width, "SHARES": shares}, (rounds, eps, hc_eps)
    grid = (cdiv(tokens, few), cdiv(width, mixed_columns))
    launch(finish, grid, *tensors, tokens, width, mixed_columns, *numbers, **sizes)


def _backward(left_grad, mixed_grad, number, inverse, coefficient, *arguments):
    """The gradients of the five tensors among the inputs."""
    streams, update, phi, bias, scale, rounds, _, hc_eps = contiguous(Inputs(*arguments))
    grads = (left_grad.contiguous(), mixed_grad.contiguous())
    product, update_grad = _products(streams, update, grads, coefficient)
    kept = (number, inverse, bias, scale, coefficient)
    *pulls, parts = _coefficient_gradients(product, kept, streams.shape[3], rounds, hc_eps)
    streams_grad, phi_parts = _stream_gradients(streams, (*grads, _operand(phi, streams), coefficient, *pulls))
    weights = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (phi, bias, scale)]
    _add_parts(phi_parts, parts, weights, streams.shape[2])
    return streams_grad, update_grad, *weights


def _products(streams: Tensor, update: Tensor, grads: tuple[Tensor, Tensor], coefficient: Tensor):
    """By rows: the products [(X+1)(X+1), N] and the gradient of the update."""
    from .kernels import products

    count, width, tokens, tile = *streams.shape[2:], coefficient.shape[1], blocks(streams)
    product, update_grad = coefficient.new_empty((count + 1) ** 2, tokens), torch.empty_like(update)
    tensors = (streams, update, *grads, coefficient, product, update_grad)
    sizes = {"X": count, "TOKENS": TILE // 2, "LANES": min(32, tile.width)}
    candidates = _tile(tile.width, 8, 3), _tile(max(tile.width // 2, min(32, tile.width)), 4, 3)
    programs = cdiv(tokens, TILE // 2)
    launch_fastest("mhc.products", products, lambda _: (programs,), (*tensors, tokens, width), candidates, **sizes)
    return product, update_grad


def _coefficient_gradients(product: Tensor, kept: tuple[Tensor, ...], width: int, rounds: int, hc_eps: float):
    """Return the pulls [N,C] and [N] on the streams, and parts of the sums [parts,2,C] that are the gradients of bias
    and, number by number, of scale.

    `kept` are the numbers [N,C], the inverse rms [N], bias, scale and the coefficients [C,N].
    """
    from .kernels import coefficient_gradients

    number, inverse = kept[:2]
    (tokens, numbers), count = number.shape, math.isqrt(product.shape[0]) - 1
    tile = 512 // count**2  # tokens: four numbers of the mixing matrices a thread
    programs = cdiv(tokens, tile)
    pull, along, partial = torch.empty_like(number), torch.empty_like(inverse), number.new_empty(programs, 2, numbers)
    tensors = (product, *kept, pull, along, partial)
    sizes = {"X": count, "ROUNDS": rounds, "TOKENS": tile}
    launch(coefficient_gradients, (programs,), *tensors, tokens, count * width, hc_eps, **sizes, num_warps=4)
    return pull, along, partial


def _stream_gradients(streams: Tensor, others: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """By columns: the gradient of the streams, and parts of the sum that is phi's, [parts,C,X*D].

    `others` are both results' gradients, phi, the coefficients and the pulls on the streams.
    """
    from .kernels import stream_gradients

    _, _, phi, coefficient, *_ = others
    count, width, tokens, tile = *streams.shape[2:], coefficient.shape[1], blocks(streams)
    rows = max(64, cdiv(tokens, SPLITS * TILE) * TILE)
    parts = cdiv(tokens, rows)
    streams_grad, partial = torch.empty_like(streams), coefficient.new_empty(parts, *phi.shape)
    tensors = (streams, *others, streams_grad, partial)
    sizes = {"X": count, "TOKENS": TILE, "PADDED": tile.padded, "PRECISION": tile.precision}
    arguments = (*tensors, tokens, width, rows)
    candidates = _tile(tile.column, tile.warps, 2), _tile(tile.column, tile.warps, 3)
    grid = cdiv(width, tile.column), parts
    launch_fastest("mhc.stream_gradients", stream_gradients, lambda _: grid, arguments, candidates, **sizes)
    return streams_grad, partial


def _add_parts(phi_parts: Tensor, parts: Tensor, grads: list[Tensor], count: int) -> None:
    """Write the gradients of phi, bias and scale."""
    from .kernels import add_parts

    size, numbers = grads[0].numel(), parts.shape[2]
    sizes = {"X": count, "ROWS": SPLITS, "COLUMNS": 128, "PADDED": power_of_two(numbers)}
    tensors = (phi_parts, parts, *grads)
    launch(add_parts, (1 + cdiv(size, 128),), *tensors, size, len(phi_parts), len(parts), **sizes, num_warps=4)


def _operand(phi: Tensor, streams: Tensor) -> Tensor:
    """phi as it is multiplied: rounded like bfloat16 streams; float16 has too few exponents for it."""
    return phi.to(torch.bfloat16 if streams.dtype == torch.bfloat16 else torch.float32).contiguous()


def _results(*arguments):
    """Uninitialised; what `_forward` returns of tensors without data."""
    streams, update = arguments[:2]
    whole, (tokens, count) = torch.contiguous_format, (streams.shape[:2].numel(), streams.shape[2])
    number = streams.new_empty(tokens, 2 * count + count * count, dtype=torch.float32)
    mixed = torch.empty_like(update, dtype=streams.dtype, memory_format=whole)
    left = torch.empty_like(streams, memory_format=whole)
    return left, mixed, number, number.new_empty(tokens), number.new_empty(number.shape[::-1])


_operator = register(
    "mhc_boundary", _forward, _results, _backward, learned=LEARNED, takes=Inputs, outputs=5, results=2, saved=3
)
