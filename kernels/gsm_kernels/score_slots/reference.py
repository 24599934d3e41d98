"""Plain PyTorch scores of selected slots, in chunks of rows. Backward computes them again from the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision, once, scratch_elements
from ..indexer import weigh
from ..rows import slices
from ..slots import flat_slots, gather_slots
from .inputs import Inputs


def score_slots(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.score_slots`."""
    return _Scores.apply(*inputs)


class _Chunk(NamedTuple):
    """Some rows, for products in one batch a row: [B*R,J,I] queries, [B*R,K,I] keys, and how far each head fired."""

    rows: slice
    queries: Tensor
    weight_BRJ: Tensor
    keys: Tensor
    index_BRK: Tensor
    fired_BRJK: Tensor


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        inputs = Inputs(*tensors)
        ctx.save_for_backward(*tensors)
        score_BRK = inputs.query_BRJI.new_empty(inputs.index_BRK.shape)
        for chunk in _chunks(inputs):
            score = weigh(chunk.fired_BRJK, chunk.weight_BRJ)
            score_BRK[:, chunk.rows] = score.masked_fill_(chunk.index_BRK < 0, 0)
        return score_BRK

    @staticmethod
    @once
    def backward(ctx, grad_BRK):
        inputs = Inputs(*ctx.saved_tensors)
        with full_precision(grad_BRK):
            return *_gradients(inputs, at_least_float32(grad_BRK)), None


def _chunks(inputs: Inputs) -> Iterator[_Chunk]:
    batch, length, heads, width = inputs.query_BRJI.shape
    key_BFI = at_least_float32(inputs.key_BFI)
    per_row = batch * inputs.index_BRK.shape[2] * max(width, heads)
    step = max(1, scratch_elements(key_BFI.device) // max(1, per_row))
    for rows in slices(length, step):
        query_BRJI, weight_BRJ = (at_least_float32(x[:, rows]) for x in inputs[:2])
        index_BRK = inputs.index_BRK[:, rows]
        queries, keys = query_BRJI.flatten(0, 1), gather_slots(key_BFI, index_BRK)
        fired_BRJK = torch.bmm(queries, keys.mT).relu_().view(*query_BRJI.shape[:3], keys.shape[1])
        yield _Chunk(rows, queries, weight_BRJ, keys, index_BRK, fired_BRJK)


def _gradients(inputs: Inputs, grad_BRK: Tensor) -> Iterator[Tensor]:
    query_grad, weight_grad, key_grad = (grad_BRK.new_zeros(x.shape) for x in inputs[:3])
    for chunk in _chunks(inputs):
        score_grad = grad_BRK[:, chunk.rows].masked_fill(chunk.index_BRK < 0, 0)[:, :, None]
        weight_grad[:, chunk.rows] = (chunk.fired_BRJK * score_grad).sum(-1)
        # Where a head fired, its gradient is its weight times the score's.
        fired_grad = chunk.fired_BRJK.sign_().mul_(chunk.weight_BRJ[..., None]).mul_(score_grad).flatten(0, 1)
        query_grad[:, chunk.rows] = torch.bmm(fired_grad, chunk.keys).unflatten(0, score_grad.shape[:2])
        if key_grad.shape[1]:
            flat = flat_slots(chunk.index_BRK, key_grad.shape[1])
            added = torch.bmm(fired_grad.mT, chunk.queries).flatten(0, 1)
            key_grad.view(-1, key_grad.shape[2]).index_add_(0, flat, added)
    grads = (query_grad, weight_grad, key_grad)
    return (grad.to(x.dtype) for grad, x in zip(grads, inputs[:3], strict=True))
