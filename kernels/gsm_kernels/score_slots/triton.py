"""Scores of selected slots in Triton: one kernel forward; backward, one kernel and a sum over each slot.

A program gathers the keys of a row into registers and multiplies them by all heads at once. Neighbouring rows that
select the same slots share them in the L2 cache. Backward computes the products again, and writes each place's
contribution to its key's gradient, float32 [rows, K, I], for a chunk of rows. `gsm_kernels.inverse` sums these slot by
slot without atomics, so that every run gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..indexer import Indexer
from ..inputs import learns
from ..inverse import add_segments, inverse_index
from ..launch import cdiv, power_of_two
from ..register import register
from ..rows import Rows, lines_of, row_chunks
from ..tiles import Tile, launch_fastest
from .reference import Inputs

# Backward has a matrix product with a transposed left operand in registers. With 64 rows, for which Triton uses wgmma,
# such products have been compiled wrongly (fla-org/flash-linear-attention#640).
MOST_HEADS = 32


def refuses(inputs: Inputs) -> str | None:
    """Return why the kernels cannot take this call, or None."""
    return unlearnable(inputs.indexer) or inputs.indexer.unfit()


def unlearnable(indexer: Indexer) -> str | None:
    """Return why `add_gradients` cannot take this indexer, or None."""
    heads = indexer.query_BRJI.shape[2]
    if heads <= MOST_HEADS or not learns(*indexer):
        return None
    return f"has gradients for at most {MOST_HEADS} index heads, got {heads}"


def score_slots(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.score_slots`."""
    return _operator(*inputs)


def _forward(*arguments):
    inputs = Inputs(*arguments)
    batch, rows = inputs.index_BRK.shape[:2]
    index = inputs.index_BRK.contiguous().flatten(0, 1)
    score = score_listed(inputs.indexer.readable(), index, Rows(0, batch, 0, rows))
    return score.view(inputs.index_BRK.shape).to(inputs.query_BRJI.dtype)


def _backward(grad, *arguments):
    inputs = Inputs(*arguments)
    indexer, index, grad = inputs.indexer.readable(), inputs.index_BRK.contiguous(), grad.contiguous()
    grads = (torch.empty_like(indexer.query_BRJI), torch.empty_like(indexer.weight_BRJ), zeros_for(indexer.key_BFI))
    for part in row_chunks(index.shape, index.shape[2] * indexer.query_BRJI.shape[3]):
        add_gradients(grads, lines_of(grad, part), indexer, index, part)
    return grads[0].to(inputs.query_BRJI.dtype), grads[1], grads[2].to(inputs.key_BFI.dtype)


def _shape(query, weight, key, index):
    return query.new_empty(index.shape)


LEARNED = ("query_BRJI", "weight_BRJ", "key_BFI")
_operator = register("score_slots", _forward, _shape, _backward, takes=Inputs, learned=LEARNED)


def zeros_for(x: Tensor) -> Tensor:
    """Return contiguous float32 zeros with the shape of `x`."""
    return x.new_zeros(x.shape, dtype=torch.float32)


def score_listed(indexer: Indexer, index: Tensor, part: Rows, group: int = 1) -> Tensor:
    """Return the scores of listed slots for a chunk of rows, float32 [lines, places * group].

    Args:
        indexer: the inputs of the scores, from `Indexer.readable`.
        index: the slots, or with group > 1 the groups of slots, of each line, [lines, places].
        part: the chunk.
        group: slots per group.
    """
    from .kernels import forward

    query, key, places = indexer.query_BRJI, indexer.key_BFI, index.shape[1] * group
    score = key.new_empty((part.lines, places), dtype=torch.float32)
    arguments = (*indexer, index, score, *part.place(query.shape[1]), key.shape[1], places)
    constants, tiles = _tiles(query, 128)

    def grid(tile: dict[str, int]) -> tuple[int]:
        return (part.lines * cdiv(places, tile["KS"]),)

    launch_fastest("score_slots.forward", forward, grid, arguments, tiles, GROUP=group, **constants)
    return score


def add_gradients(grads: tuple[Tensor, ...], grad: Tensor, indexer: Indexer, index_BRK: Tensor, part: Rows) -> None:
    """Write the gradients of a chunk's queries and weights, and add to the gradient of the keys.

    Args:
        grads: the buffers of all rows and slots; that of the keys is float32.
        grad: the gradient of the scores, [lines, places].
        indexer: the inputs of the scores, from `Indexer.readable`.
        index_BRK: the slots of all rows.
        part: the chunk.
    """
    from .kernels import backward

    query_grad, weight_grad, key_grad = grads
    places, (_, slots, width) = index_BRK.shape[2], indexer.key_BFI.shape
    pairs = indexer.key_BFI.new_empty((part.lines * places, width), dtype=torch.float32)
    tensors = (*indexer, lines_of(index_BRK, part), grad, query_grad, weight_grad, pairs)
    sizes = (*part.place(indexer.query_BRJI.shape[1]), slots, places)
    constants, tiles = _tiles(indexer.query_BRJI, 64)
    launch_fastest("score_slots.backward", backward, lambda _: (part.lines,), (*tensors, *sizes), tiles, **constants)
    inverse = inverse_index(index_BRK, slots, part)
    add_segments(key_grad[part.batch0 : part.batch0 + part.batches].flatten(0, 1), pairs, inverse)


def _tiles(query: Tensor, places: int) -> tuple[dict[str, int], tuple[Tile, ...]]:
    """Return the constants and the candidate tiles: `places` places or half of them. float32 does not use tensor cores,
    and its operands are in registers, which hold fewer keys."""
    heads, width = query.shape[2:]
    constants = {"J": heads, "I": width, "HEADS": power_of_two(heads, 16), "WIDTH": power_of_two(width, 16)}
    several = (32,) if query.dtype == torch.float32 else (places, places // 2)
    return constants, tuple((("KS", size), ("num_warps", 4), ("num_stages", 1)) for size in several)
