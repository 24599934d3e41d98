"""Plain PyTorch scores of selected slots, in chunks of rows. Backward computes the products again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision, once, scratch_elements
from ..indexer import Fired, Indexer, fire
from ..rows import slices
from ..shapes import agree


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.score_slots`, documented there."""

    query_BRJI: Tensor
    weight_BRJ: Tensor
    key_BFI: Tensor
    index_BRK: Tensor

    @property
    def indexer(self) -> Indexer:
        """The inputs of the scores, which get a gradient."""
        return Indexer(*self[:3])


def check(inputs: Inputs) -> None:
    """Raise ValueError if a letter has two sizes."""
    agree("score_slots", inputs)


def score_slots(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.score_slots`."""
    return _Scores.apply(*inputs)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        inputs = Inputs(*tensors)
        ctx.save_for_backward(*tensors)
        score_BRK = inputs.query_BRJI.new_empty(inputs.index_BRK.shape)
        for chunk, hidden in _chunks(inputs):
            score_BRK[:, chunk.rows] = chunk.score().masked_fill_(hidden, 0)
        return score_BRK

    @staticmethod
    @once
    def backward(ctx, grad_BRK):
        inputs, wide_BRK = Inputs(*ctx.saved_tensors), at_least_float32(grad_BRK)
        grads = tuple(wide_BRK.new_zeros(x.shape) for x in inputs.indexer)
        with full_precision(grad_BRK):
            for chunk, hidden in _chunks(inputs):
                chunk.add_gradients(grads, wide_BRK[:, chunk.rows].masked_fill(hidden, 0))
        return *(grad.to(x.dtype) for grad, x in zip(grads, inputs.indexer, strict=True)), None


def _chunks(inputs: Inputs) -> Iterator[tuple[Fired, Tensor]]:
    """Yield the products of a range of rows, and the mask of index_BRK = -1 in these rows."""
    batch, length, heads, width = inputs.query_BRJI.shape
    per_row = batch * inputs.index_BRK.shape[2] * max(width, heads)
    for rows in slices(length, max(1, scratch_elements(inputs.key_BFI.device) // max(1, per_row))):
        yield fire(inputs.indexer, rows, inputs.index_BRK), inputs.index_BRK[:, rows] < 0
