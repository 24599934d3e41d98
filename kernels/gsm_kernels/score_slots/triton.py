"""Scores of selected slots: one kernel forward, and backward one that computes them again and a sum over each slot.

A row's keys are gathered into registers, multiplied with all its heads at once and never stored: forward reads K I
numbers a row, from the second-level cache where neighbouring rows choose alike. Backward writes what each place adds to
its key's gradient, [rows, K, I] in float32 for a chunk of rows of 64 MB, and `gsm_kernels.inverse` adds these up slot
by slot without atomic additions: the same bits in every run. Operations: 2 K J I a row forward, 6 K J I backward, of
which a matrix unit's tile of 16 heads wastes half for 8 heads; derived, the bytes outweigh them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..index_top_k.triton import Rows, lines_of, row_chunks, unfit_indexer
from ..inverse import add_segments, inverse_index
from ..launch import build_once, launch, power_of_two


def refuses(query_BRJI: Tensor, weight_BRJ: Tensor, key_BFI: Tensor, index_BRK: Tensor) -> str | None:
    """Why this call is not for the kernels."""
    return unfit_indexer(query_BRJI, weight_BRJ, key_BFI)


def score_slots(query_BRJI: Tensor, weight_BRJ: Tensor, key_BFI: Tensor, index_BRK: Tensor) -> Tensor:
    """See `gsm_kernels.score_slots`."""
    inputs = (query_BRJI, weight_BRJ, key_BFI)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        grad = query_BRJI.new_empty(index_BRK.shape)
        shape = (query_BRJI.device, *(x.dtype for x in inputs), *query_BRJI.shape[2:])
        build_once(("score_slots", *shape), lambda: _backward(grad, *inputs, index_BRK))
    return _forward(*inputs, index_BRK)


@torch.library.custom_op("gsm_kernels::score_slots", mutates_args=())
def _forward(query: Tensor, weight: Tensor, key: Tensor, index: Tensor) -> Tensor:
    whole = Rows(0, index.shape[0], 0, index.shape[1])
    score = score_listed(*alike(query, weight, key), index.contiguous().flatten(0, 1), whole)
    return score.view(index.shape).to(query.dtype)


@torch.library.custom_op("gsm_kernels::score_slots_backward", mutates_args=())
def _backward(grad: Tensor, query: Tensor, weight: Tensor, key: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs, index, grad = alike(query, weight, key), index.contiguous(), grad.contiguous()
    grads = (torch.empty_like(inputs[0]), torch.empty_like(inputs[1]), zeros_for(key))
    for part in row_chunks(index.shape, index.shape[2] * query.shape[3]):
        add_gradients(grads, lines_of(grad, part), *inputs, lines_of(index, part), part)
    return grads[0].to(query.dtype), grads[1], grads[2].to(key.dtype)


@_forward.register_fake
def _(query: Tensor, weight: Tensor, key: Tensor, index: Tensor) -> Tensor:
    return query.new_empty(index.shape)


@_backward.register_fake
def _(grad: Tensor, query: Tensor, weight: Tensor, key: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), weight.new_empty(weight.shape), key.new_empty(key.shape)


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors), None


_forward.register_autograd(_gradients, setup_context=_keep)


def alike(query: Tensor, weight: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous, queries and keys in one dtype, as a matrix unit wants them."""
    common = torch.promote_types(query.dtype, key.dtype)
    return query.to(common).contiguous(), weight.contiguous(), key.to(common).contiguous()


def zeros_for(x: Tensor) -> Tensor:
    """Contiguous zeros in float32, for sums."""
    return x.new_zeros(x.shape, dtype=torch.float32)


def score_listed(query: Tensor, weight: Tensor, key: Tensor, index: Tensor, part: Rows, group: int = 1) -> Tensor:
    """Scores [lines, places * group] in float32 of the slots, or of all slots of the groups, that are listed for a
    chunk of rows in `index` [lines, places]."""
    from .kernels import forward

    places = index.shape[1] * group
    score = key.new_empty((part.lines, places), dtype=torch.float32)
    tile = _tile(query, 128)
    tiles = -(-places // tile["KS"])
    rows = (part.batch0, part.row0, part.rows, query.shape[1], key.shape[1], places, tiles)
    launch(forward, (part.lines * tiles,), query, weight, key, index, score, *rows, GROUP=group, **tile)
    return score


def add_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    query: Tensor,
    weight: Tensor,
    key: Tensor,
    index: Tensor,
    part: Rows,
) -> None:
    """Given the scores' gradient `grad` [lines, places], write those of a chunk's queries and weights and add that of
    the keys, which is float32."""
    from .kernels import backward

    query_grad, weight_grad, key_grad = grads
    places, slots, width = index.shape[1], key.shape[1], key.shape[2]
    pairs = key.new_empty((part.lines * places, width), dtype=torch.float32)
    rows = (part.batch0, part.row0, part.rows, query.shape[1], slots, places)
    args = (query, weight, key, index, grad, query_grad, weight_grad, pairs, *rows)
    launch(backward, (part.lines,), *args, **_tile(query, 64))
    inverse = inverse_index(index.view(part.batches, part.rows, places), slots)
    add_segments(key_grad[part.batch0 : part.batch0 + part.batches].flatten(0, 1), pairs, inverse)


def _tile(query: Tensor, places: int) -> dict[str, int]:
    """Four warps multiply tiles of 64 places. In float32, products are made from registers, which hold fewer keys."""
    heads, width = query.shape[2:]
    padded = {"HEADS": power_of_two(heads, 16), "WIDTH": power_of_two(width, 16)}
    places = 32 if query.dtype == torch.float32 else places
    return {"J": heads, "I": width, **padded, "KS": places, "num_warps": 4, "num_stages": 1}
