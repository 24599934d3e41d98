"""The indexer's loss in Triton, in chunks of rows. A chunk stores one mass and one score per row and slot.

For each chunk of rows:

1. A kernel rotates and scales the queries, and rounds them to the dtype of the bank.
2. Teacher. With `dense`, one kernel computes the softmax denominator of every head (over window, visible slots and
   sink, as in flash attention); another computes the logits again and sums the probabilities over heads in registers.
   Otherwise, one program takes all heads of a row and gathers the selected entries.
3. Scores. With `dense`, they come from the first kernel of `index_top_k`, otherwise from `score_slots`.
4. A kernel computes the divergence of each row, and overwrites the scores by their gradient.
5. Gradients of the indexer. With `dense`, one kernel computes those of queries and weights, and another that of the
   keys, whose parts over rows are summed in a fixed order. Otherwise they are those of `score_slots`.

There are no atomic additions, so every run gives the same bits. The buffers of a chunk take at most 48 MiB.

Source: the indexer's warm-up loss of DeepSeek-V3.2; the online sum of Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..index_top_k.triton import Search, members_of
from ..inputs import contiguous, learns, schema
from ..launch import cdiv, in_float32, launch, power_of_two, unfit
from ..register import register
from ..rows import Rows, lines_of, row_chunks
from ..score_slots.triton import add_gradients, score_listed, unlearnable, zeros_for
from ..with_gradients import with_gradients
from .inputs import IndexerLoss, Inputs

LOG2E = 1.4426950408889634


def refuses(inputs: Inputs) -> str | None:
    """Return why the kernels cannot take this call, or None."""
    heads, channels = inputs.query_BRHC.shape[2:]
    if not 1 <= heads <= 128 or channels > 128 or channels % 2:
        return f"made for 1 to 128 heads of an even width up to 128, got {heads} of width {channels}"
    floats = (inputs.query_BRHC, inputs.window_BEC, inputs.sink_H, inputs.cos_BRP, inputs.sin_BRP, inputs.bank_BFC)
    operands = (inputs.query_BRHC, inputs.index_query_BRJI, inputs.index_key_BFI)
    refusal = None if inputs.dense else unlearnable(inputs.indexer)
    return refusal or inputs.indexer.unfit() or unfit(*floats) or in_float32(*operands)


def indexer_kl(inputs: Inputs) -> IndexerLoss:
    """See `gsm_kernels.indexer_kl`."""
    wants_grad = learns(*inputs.indexer)
    with torch.no_grad():
        loss, recall, *grads = _operator(*inputs, wants_grad)
    return IndexerLoss(with_gradients(loss, inputs.indexer, grads), recall)


def _forward(*arguments):
    *given, wants_grad = arguments
    inputs = _readable(Inputs(*given))
    position = inputs.position_BR
    grads = [zeros_for(x) if wants_grad else x.new_empty((0,), dtype=torch.float32) for x in inputs.indexer]
    loss, held, sees = torch.zeros((3, *position.shape), dtype=torch.float32, device=position.device).unbind()
    for part in row_chunks(position.shape, _per_row(inputs)):
        _add_chunk(inputs, part, loss, held, sees, grads if wants_grad else None)
    count = (position >= 0).sum().clamp(min=1)
    recall = held.sum() / sees.sum() if inputs.dense else torch.full_like(loss.sum(), torch.nan)
    return loss.sum() / count, recall, *(grad.div_(count) for grad in grads)


def _empty(*arguments):
    *given, wants_grad = arguments
    inputs = Inputs(*given)
    loss, recall = (inputs.query_BRHC.new_empty((), dtype=torch.float32) for _ in range(2))
    shapes = ((x, x.shape if wants_grad else (0,)) for x in inputs.indexer)
    return loss, recall, *(x.new_empty(shape, dtype=torch.float32) for x, shape in shapes)


_operator = register("indexer_kl", _forward, _empty, takes=f"{schema(Inputs)}, bool wants_grad", outputs=5)


def _readable(inputs: Inputs) -> Inputs:
    """Return contiguous inputs, with window and bank in the dtype of the queries, as `tl.dot` needs them, and without
    a pool unless `dense`."""
    dtype = inputs.query_BRHC.dtype
    index_query, index_weight, index_key = inputs.indexer.readable()
    readable = inputs._replace(
        window_BEC=inputs.window_BEC.to(dtype),
        bank_BFC=inputs.bank_BFC.to(dtype),
        index_query_BRJI=index_query,
        index_weight_BRJ=index_weight,
        index_key_BFI=index_key,
        pool_BRN=inputs.pool_BRN if inputs.dense else None,
    )
    return contiguous(readable)


def _per_row(inputs: Inputs) -> int:
    """Return the 4-byte elements of a row's buffers: queries, mass, scores, and its pool or its keys' gradients."""
    heads, channels = inputs.query_BRHC.shape[2:]
    queries, compared = heads * channels * inputs.bank_BFC.element_size() // 4 + heads, inputs.compared
    more = compared // inputs.block // 4 if inputs.dense else compared * inputs.index_query_BRJI.shape[3]
    return queries + 2 * compared + more


def _add_chunk(
    inputs: Inputs, part: Rows, loss: Tensor, held: Tensor, sees: Tensor, grads: list[Tensor] | None
) -> None:
    """Write loss, mass held, and visibility of a chunk of rows; write or add its gradients, if there are any."""
    mass, score = _compare(inputs, part)
    _diverge(inputs, part, mass, score, loss, held, sees)
    del mass
    if grads is not None:
        _add_gradients(inputs, part, score, grads)


def _compare(inputs: Inputs, part: Rows) -> tuple[Tensor, Tensor]:
    """Return the teacher's mass and the indexer's scores, both [lines, compared slots]."""
    query = _rotated(inputs, part)
    if inputs.dense:
        pool = inputs.pool_BRN
        member = None if pool is None else members_of(pool, part, inputs.compared, inputs.block)
        mass = _mass_of_visible(inputs, part, query, member)
        search = Search(inputs.indexer, inputs.first_BR, inputs.last_BR)
        return mass, search.best_of_groups(part, 1, member, inputs.block)
    index = lines_of(inputs.index_BRK, part)
    return _mass_of_selected(inputs, part, query, index), score_listed(inputs.indexer, index, part)


def _diverge(inputs: Inputs, part: Rows, mass: Tensor, score: Tensor, loss: Tensor, held: Tensor, sees: Tensor) -> None:
    """Write each row's loss, mass held, and whether it sees a slot; overwrite its scores by their gradient."""
    from .kernels import divergence

    index = lines_of(inputs.index_BRK, part)
    tensors = (mass, score, inputs.position_BR, inputs.first_BR, inputs.last_BR, index, loss, held, sees)
    sizes = (*_place(inputs, part), inputs.compared, index.shape[1])
    # Up to 2,048 columns at a time, 16 per thread.
    block = min(power_of_two(inputs.compared, 16), 2048)
    launch(divergence, (part.lines,), *tensors, *sizes, DENSE=inputs.dense, BLOCK=block)


def _add_gradients(inputs: Inputs, part: Rows, score_grad: Tensor, grads: list[Tensor]) -> None:
    """Write the gradients of a chunk's queries and weights, and add to the gradient of the keys."""
    from .kernels import key_gradients, query_gradients

    query_grad, weight_grad, key_grad = grads
    indexer, slots = inputs.indexer, inputs.compared
    if not inputs.dense:
        add_gradients((query_grad, weight_grad, key_grad), score_grad, indexer, inputs.index_BRK, part)
        return
    heads, width = indexer.query_BRJI.shape[2:]
    tile = {"J": heads, "I": width, "WIDTH": power_of_two(width, 16), **_tile(indexer.query_BRJI.dtype, 64)}
    row_tiles, slot_tiles = cdiv(part.rows, tile["ROWS"]), cdiv(slots, tile["SLOTS"])
    common = (*indexer, score_grad, inputs.position_BR, inputs.first_BR, inputs.last_BR)
    sizes = (*_place(inputs, part), slots)
    grid = (part.batches * row_tiles * heads,)
    launch(query_gradients, grid, *common, query_grad, weight_grad, *sizes, row_tiles, **tile)
    # Divide the rows into enough parts for two programs on each of 132 multiprocessors.
    splits = max(min(cdiv(264, max(part.batches * slot_tiles, 1)), row_tiles), 1)
    parts = key_grad.new_empty((splits, part.batches, slots, width))
    grid = (splits * part.batches * slot_tiles,)
    tile["ROWS"] = 32  # keys and their gradient stay in registers
    launch(key_gradients, grid, *common, parts, *sizes, slot_tiles, splits, part.batches, **tile)
    key_grad[part.batch0 : part.batch0 + part.batches] += parts.sum(0)


def _rotated(inputs: Inputs, part: Rows) -> Tensor:
    """Return the queries of a chunk, [lines,H,C], rotated and scaled, in the dtype of the bank."""
    from .kernels import rotate

    _, length, heads, channels = inputs.query_BRHC.shape
    out = inputs.bank_BFC.new_empty((part.lines, heads, channels))
    row0, scale = part.batch0 * length + part.row0, channels**-0.5 * LOG2E
    tensors = (inputs.query_BRHC, inputs.cos_BRP, inputs.sin_BRP, out)
    sizes = (row0, part.lines, scale, inputs.cos_BRP.shape[2])
    launch(rotate, (cdiv(out.numel(), 1024),), *tensors, *sizes, H=heads, C=channels, BLOCK=1024, num_warps=4)
    return out


def _mass_of_visible(inputs: Inputs, part: Rows, query: Tensor, member: Tensor | None) -> Tensor:
    from .kernels import mass_of_visible, normaliser

    window, bank, first = inputs.window_BEC, inputs.bank_BFC, inputs.first_BR
    slots, (heads, channels) = inputs.compared, query.shape[1:]
    below = query.new_empty((part.lines, heads), dtype=torch.float32)
    mass = query.new_empty((part.lines, slots), dtype=torch.float32)
    pool = first if member is None else member
    tile = {"H": heads, "C": channels, "POOLED": member is not None, "WIDTH": power_of_two(channels, 16)}
    tile |= _tile(bank.dtype, 128)
    row_tiles, slot_tiles = cdiv(part.rows, tile["ROWS"]), cdiv(slots, tile["SLOTS"])
    seen = (inputs.position_BR, first, inputs.last_BR, pool)
    sizes = (window.shape[1], slots, inputs.width, row_tiles, pool.shape[1], inputs.block)
    args = (query, window, bank, inputs.sink_H, *seen, below, *_place(inputs, part), *sizes)
    launch(normaliser, (part.batches * row_tiles * heads,), *args, **tile)
    sizes = (slots, row_tiles, slot_tiles, pool.shape[1], inputs.block)
    args = (query, bank, below, *seen, mass, *_place(inputs, part), *sizes)
    launch(mass_of_visible, (part.batches * row_tiles * slot_tiles,), *args, **tile)
    return mass


def _mass_of_selected(inputs: Inputs, part: Rows, query: Tensor, index: Tensor) -> Tensor:
    from .kernels import mass_of_selected

    window, bank = inputs.window_BEC, inputs.bank_BFC
    heads, channels = query.shape[1:]
    mass = torch.empty(index.shape, dtype=torch.float32, device=index.device)
    tensors = (query, window, bank, inputs.sink_H, inputs.position_BR, index, mass)
    sizes = (*_place(inputs, part), window.shape[1], bank.shape[1], inputs.width, index.shape[1])
    tile: dict[str, Any] = {"HEADS": power_of_two(heads, 16), "WIDTH": power_of_two(channels, 16)}
    wide = bank.dtype == torch.float32
    tile |= {"H": heads, "C": channels, "SLOTS": 16 if wide else 64, "num_warps": 8 if wide else 4}
    launch(mass_of_selected, (part.lines,), *tensors, *sizes, **tile, num_stages=2)
    return mass


def _place(inputs: Inputs, part: Rows) -> tuple[int, int, int, int]:
    return part.place(inputs.position_BR.shape[1])


def _tile(dtype: torch.dtype, slots: int) -> dict[str, int]:
    """Return the options of a tile of logits, 64 rows x `slots`.

    With 128 slots, the logits of one head and their sums take 64 registers each in 128 threads (see `score_tiles`).
    The gradient kernels hold two more such tiles, so they take 64 slots. float32 uses no tensor cores, and takes less.
    """
    if dtype == torch.float32:
        return {"ROWS": 32, "SLOTS": 32, "num_warps": 8, "num_stages": 1}
    return {"ROWS": 64, "SLOTS": slots, "num_warps": 4, "num_stages": 2}
