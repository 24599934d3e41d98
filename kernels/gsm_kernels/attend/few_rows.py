"""Attention of a few rows without gradients, as in decoding: a row's columns are shared out among programs.

One token with 256 entries is work for one of 132 processors, which would take its tiles one after the other; in shares
of 32 they are read at the same time, and a second kernel joins them. Derived: two launches, and 2 (W + K) C bytes of
entries that are in the L2 cache. Sizes follow from shapes alone, so that a CUDA graph can hold both kernels.

Source: "Flash-Decoding" (Dao et al. 2023).
"""

from __future__ import annotations

import torch

from ..launch import launch, power_of_two
from .inputs import INPUTS, Inputs

PROCESSORS = 132  # of an H100
SHARE = 32  # columns that are worth a program


def splits(inputs: Inputs) -> int:
    """How many programs share a row's columns: as many as a few rows leave idle; 1: the ordinary kernel is as good."""
    batch, rows = inputs.query_BRHC.shape[:2]
    columns = inputs.width + (inputs.picks if inputs.slots else 0)
    return max(1, min(-(-columns // SHARE), PROCESSORS // max(batch * rows, 1)))


@torch.library.custom_op("gsm_kernels::attend_few_rows", mutates_args=(), schema=f"({INPUTS}, int shares) -> Tensor")
def few_rows(*arguments):
    """The output of `attend` or `attend_band`; takes the fields of `Inputs`, then the number of shares."""
    from .few_rows_kernels import join, split

    *given, shares = arguments
    inputs = Inputs(*given).contiguous()
    batch, rows, heads, channels = inputs.query_BRHC.shape
    padded = power_of_two(heads, 16)  # what a matrix product takes
    out_BRHC = torch.empty_like(inputs.query_BRHC)
    high, total = inputs.query_BRHC.new_empty(2, batch * rows * shares, padded, dtype=torch.float32)
    mixed = high.new_empty(*high.shape, channels)
    cut = {"HEADS": padded, "SPLITS": shares, "num_warps": 4}
    constants = inputs.constants()
    grid, read = (batch * rows * shares,), (*inputs.read(), high, total, mixed)
    launch(split, grid, *read, *inputs.sizes(), **constants, **cut, BLOCK=SHARE, num_stages=2)
    read = (high, total, mixed, inputs.sink_H, inputs.cos_BRP, inputs.sin_BRP)
    constants = {name: constants[name] for name in ("H", "C", "PAIRS")}
    launch(join, (batch * rows,), *read, out_BRHC, rows, **constants, **cut)
    return out_BRHC


@few_rows.register_fake
def _(*arguments):
    return torch.empty_like(arguments[0], memory_format=torch.contiguous_format)
