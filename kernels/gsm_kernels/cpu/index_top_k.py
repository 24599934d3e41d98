"""Top-k selection on a CPU: PyTorch computes the matrix products, and compiled loops do the rest row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..device import at_least_float32
from ..dispatch import Impl
from ..index_top_k import candidate_pool as pooling
from ..index_top_k import index_top_k as selection
from ..index_top_k.inputs import Inputs, chosen
from ..index_top_k.reference import row_slices
from ..register import noted, register
from .native import loops, missing, places, run, unfit

LEAST = 1 << 13  # slots per thread, at least


@torch.no_grad()
def _slots(*arguments: Any) -> Tensor:
    inputs = Inputs(*arguments)
    pool = inputs.pool_BRN
    pooled = (-1, inputs.block) if pool is None else (pool.shape[2], inputs.block)
    return _choose(loops("index_top_k").top_k, inputs, pooled, (0 if pool is None else places(pool),))


@torch.no_grad()
def _blocks(*arguments: Any) -> Tensor:
    inputs = Inputs(*arguments)
    return _choose(loops("index_top_k").blocks, inputs, (inputs.block,), ())


def _choose(loop: Any, inputs: Inputs, numbers: tuple[int, ...], tensors: tuple[Any, ...]) -> Tensor:
    """Return the choices of a loop for every row, [B,R,k].

    Rows are processed in chunks whose products fit the scratch memory. A chunk computes only slots up to the last that
    its rows see. While a call is recorded, it computes all slots, because more are visible when the call is repeated.

    Args:
        loop: `top_k` or `blocks`.
        inputs: the inputs of the operation.
        numbers, tensors: further arguments of the loop.
    """
    batch, rows, heads, width = inputs.query_BRJI.shape
    query_BRJI, weight_BRJ, key_BFI = (at_least_float32(x) for x in inputs[:3])
    weight_BRJ, slots = weight_BRJ.contiguous(), key_BFI.shape[1]
    first_BR, last_BR = places(inputs.first_BR), places(inputs.last_BR)
    chosen_BRK = first_BR.new_empty(batch, rows, inputs.k)
    least, parts = LEAST // max(slots, 1) + 1, row_slices(inputs)
    scratch = query_BRJI.new_empty(max((part.stop - part.start for part in parts), default=0) * batch * heads * slots)
    for part in parts:
        length = part.stop - part.start
        seen = slots if noted() else min(slots, max(0, int(last_BR[:, part].max()))) if batch else 0
        query = query_BRJI[:, part].reshape(batch, length * heads, width)
        fired = scratch[: batch * length * heads * seen].view(batch, length * heads, seen)
        torch.bmm(query, key_BFI[:, :seen].mT, out=fired)
        sizes = (length, part.start, rows, seen, heads, inputs.k, *numbers)
        arrays = (fired, weight_BRJ, first_BR, last_BR, *tensors, chosen_BRK)
        run(loop, batch * length, *sizes, *arrays, least=least)
    return chosen_BRK


_index_top_k = register("index_top_k", _slots, chosen, takes=Inputs, on_cpu=True)
_candidate_pool = register("candidate_pool", _blocks, chosen, takes=Inputs, on_cpu=True)

selection.add(Impl("numba", lambda inputs: _index_top_k(*inputs), unfit, missing))
pooling.add(Impl("numba", lambda inputs: _candidate_pool(*inputs), unfit, missing))
