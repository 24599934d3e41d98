"""The hyper-connections in Triton: one kernel forward (two for few tokens), and four backward.

Forward (`forward`) reads the streams of a tile of tokens twice, the second time mostly from the L2 cache. Every program
reads all of phi, so smaller tiles would read it more often.

For up to 64 tokens, as in decoding, there would be too few programs. So `project` divides the columns of phi among up
to 64 programs, and `finish` divides those of the streams; each program of `finish` computes the coefficients of its
tokens again, in registers. The constant FEW sets up to how many tokens these two kernels are used. They read the
streams without waiting for Sinkhorn's rounds in between; measure on a GPU before you change FEW.

Backward:

1. `products`, by rows: the inner products of inputs and gradients, and the gradient of the update;
2. `coefficient_gradients`: from the products back through the coefficients;
3. `stream_gradients`, by columns: the gradient of the streams, and partial sums of that of phi in registers;
4. `add_parts`: the partial sums of all three parameters, summed in a fixed order, without atomics.

The new streams X' are not read in backward: with g the gradient of the next site's input, <g, X'_k> follows from the
products of g with the old streams and the update. Saved for backward are the inputs and, in float32, each token's
numbers, coefficients and inverse rms. Sinkhorn's divisors are computed again in registers.

Precision: bfloat16 streams are multiplied by phi rounded to bfloat16, as under autocast; float16 streams in TF32; and
float32 streams as three TF32 products, which have the precision of float32. Sums and coefficients are in float32.
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

STREAMS = (1, 2, 4, 8)  # supported numbers of streams
MOST_ROUNDS = 32  # largest number of Sinkhorn's rounds, which are unrolled in backward
TILE = 16  # tokens of a tile: rows of the smallest matrix product
FEW = 4  # largest number of tiles for `project` and `finish`
FEWEST = 4  # tokens per program of `finish`
PROGRAMS = 64  # programs that share the columns of phi, for all tiles
LEAST_STEPS = 4  # smallest number of column tiles for `project` and `finish`
SPLITS = 16  # parts of the tokens for the gradient of phi: two rounds of two programs per multiprocessor


def refuses(inputs: Inputs) -> str | None:
    """Return why the kernels cannot take this call, or None."""
    if inputs.streams_BRXD.shape[2] not in STREAMS:
        return f"made for {', '.join(map(str, STREAMS))} streams, got {inputs.streams_BRXD.shape[2]}"
    if inputs.rounds > MOST_ROUNDS:
        return f"made for at most {MOST_ROUNDS} rounds, got {inputs.rounds}"
    return unfit(*inputs[:5])


class Blocks(NamedTuple):
    """Sizes of the kernels' tiles.

    Attributes:
        width: columns of a tile of `products`, with 8 tokens: 8 elements of every stream per thread. A tile of
            `forward`, with 16 tokens, has half as many columns. It then takes 100 registers per thread in bfloat16
            instead of 227, so that a multiprocessor runs two programs: one loads while the other normalises.
        column: columns of a program of `stream_gradients`; with four streams, 64 sums of phi's gradient per thread.
        warps: warps of a program of `stream_gradients`.
        padded: C, the numbers of a token, rounded up to a power of two of at least 16.
        precision: `input_precision` of products that are not in bfloat16.
    """

    width: int
    column: int
    warps: int
    padded: int
    precision: str


def _tile(width: int, warps: int, stages: int) -> Tile:
    return ("WIDTH", width), ("num_warps", warps), ("num_stages", stages)


def blocks(streams_BRXD: Tensor) -> Blocks:
    """Return the sizes: made for up to four streams in 16 bits, and smaller for more streams or float32."""
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
    """Return both results, and each token's numbers, inverse rms and coefficients for backward."""
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
    """Return among how many programs `project` divides the columns of a tile; 0: use `forward`."""
    batch, rows, count, width = streams_BRXD.shape
    tiles, steps = cdiv(batch * rows, TILE), cdiv(count * width, blocks(streams_BRXD).width)
    if not 0 < tiles <= FEW or steps < LEAST_STEPS:
        return 0
    return 1 << (min(max(PROGRAMS // tiles, 1), steps).bit_length() - 1)  # a power of two, as Triton's blocks need


def _few_tokens(shares: int, inputs: Inputs, results: tuple[Tensor, ...]) -> None:
    """Write the results of `forward` with `project` and `finish`, for few tokens."""
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
    """Return the gradients of streams, update, phi, bias and scale."""
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
    """Return the products [(X+1)(X+1), N] and the gradient of the update."""
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
    """Return the factors of the streams' gradient, and partial sums of the gradients of bias and scale.

    Args:
        product: from `_products`.
        kept: the numbers [N,C], the inverse rms [N], bias, scale and the coefficients [C,N].
        width: D.
        rounds, hc_eps: as in `gsm_kernels.mhc`.

    Returns:
        pull [N,C] and along [N]: the gradient of a token's streams through its numbers is pull . phi + along * streams.
        partial [parts,2,C]: parts of the gradients of bias and, for each number, of its scale.
    """
    from .kernels import coefficient_gradients

    number, inverse = kept[:2]
    (tokens, numbers), count = number.shape, math.isqrt(product.shape[0]) - 1
    tile = 512 // count**2  # tokens: four elements of the mixing matrices per thread
    programs = cdiv(tokens, tile)
    pull, along, partial = torch.empty_like(number), torch.empty_like(inverse), number.new_empty(programs, 2, numbers)
    tensors = (product, *kept, pull, along, partial)
    sizes = {"X": count, "ROUNDS": rounds, "TOKENS": tile}
    launch(coefficient_gradients, (programs,), *tensors, tokens, count * width, hc_eps, **sizes, num_warps=4)
    return pull, along, partial


def _stream_gradients(streams: Tensor, others: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the gradient of the streams, and parts of the gradient of phi, [parts,C,X*D].

    `others` are the gradients of both results, phi, the coefficients, pull and along.
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
    """Write the gradients of phi, bias and scale from their parts."""
    from .kernels import add_parts

    size, numbers = grads[0].numel(), parts.shape[2]
    sizes = {"X": count, "ROWS": SPLITS, "COLUMNS": 128, "PADDED": power_of_two(numbers)}
    tensors = (phi_parts, parts, *grads)
    launch(add_parts, (1 + cdiv(size, 128),), *tensors, size, len(phi_parts), len(parts), **sizes, num_warps=4)


def _operand(phi: Tensor, streams: Tensor) -> Tensor:
    """Return phi in the dtype of its products: bfloat16 for bfloat16 streams, otherwise float32.

    float16 has too small a range for phi.
    """
    return phi.to(torch.bfloat16 if streams.dtype == torch.bfloat16 else torch.float32).contiguous()


def _results(*arguments):
    """Return uninitialised outputs of `_forward`."""
    streams, update = arguments[:2]
    whole, (tokens, count) = torch.contiguous_format, (streams.shape[:2].numel(), streams.shape[2])
    number = streams.new_empty(tokens, 2 * count + count * count, dtype=torch.float32)
    mixed = torch.empty_like(update, dtype=streams.dtype, memory_format=whole)
    left = torch.empty_like(streams, memory_format=whole)
    return left, mixed, number, number.new_empty(tokens), number.new_empty(number.shape[::-1])


_operator = register(
    "mhc_boundary", _forward, _results, _backward, learned=LEARNED, takes=Inputs, outputs=5, results=2, saved=3
)
