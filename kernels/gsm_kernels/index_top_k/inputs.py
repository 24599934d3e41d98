"""The inputs of `index_top_k` and `candidate_pool`, and their check."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..indexer import Indexer
from ..shapes import agree, require


class Inputs(NamedTuple):
    """The parameters of `gsm_kernels.index_top_k`, documented there; k is the number of blocks in `candidate_pool`."""

    query_BRJI: Tensor
    weight_BRJ: Tensor
    key_BFI: Tensor
    first_BR: Tensor
    last_BR: Tensor
    k: int
    pool_BRN: Tensor | None = None
    block: int = 8

    @property
    def indexer(self) -> Indexer:
        """The inputs of the scores."""
        return Indexer(*self[:3])


def pool(
    query_BRJI: Tensor,
    weight_BRJ: Tensor,
    key_BFI: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    blocks: int,
    block: int = 8,
) -> Inputs:
    """Return the inputs of `candidate_pool`."""
    return Inputs(query_BRJI, weight_BRJ, key_BFI, first_BR, last_BR, blocks, block=block)


def chosen(*arguments: Any) -> Tensor:
    """Return the uninitialised result, int64 [B,R,k]; `arguments` are the fields of `Inputs`."""
    inputs = Inputs(*arguments)
    return inputs.first_BR.new_empty(*inputs.first_BR.shape, inputs.k, dtype=torch.int64)


def check(op: str, count: str, inputs: Inputs) -> None:
    """Check the inputs of operation `op`, which calls its k by the name `count`.

    Raises:
        ValueError: if a letter has two sizes, or k or block is below 1.
    """
    agree(op, inputs)
    fits = inputs.k >= 1 and inputs.block >= 1
    require(op, fits, f"{count} and block must be at least 1, got {inputs.k} and {inputs.block}")
