"""The attention of `gsm_kernels.attend_blocks` by the kernels of flash-linear-attention (extra `fla`), on a GPU.

Its kernels take no ranges, but concatenated sequences, with blocks counted from the first token of each; here they are
counted from the first token of a document. Only the device knows the number of documents, so a call waits for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import absent, unfit_for_package
from ..sequences import offsets
from .inputs import Inputs

SHARED = 16  # smallest number of query heads per key head; a power of two
NARROWEST, WIDEST = 16, 256  # channels of a head, and slots of a block

missing = partial(absent, "fla", "fla.ops.nsa.parallel")


def refuses(inputs: Inputs) -> str | None:
    """Return why these kernels cannot take this call, or None."""
    refusal = unfit_for_package(*inputs[:3], waits=True) or _wrong_sizes(inputs)
    if refusal is not None:
        return refusal
    return None if inputs.own else "needs the rows to be the slots: it has no memory"


def _wrong_sizes(inputs: Inputs) -> str | None:
    """Return why these kernels cannot take these heads or blocks, or None."""
    (heads, channels), groups = inputs.query_BRHC.shape[2:], inputs.key_BFGC.shape[2]
    shared, block = heads // groups, inputs.block
    if shared < SHARED or shared & (shared - 1):
        return f"needs a power of two of at least {SHARED} query heads for a key head, got {shared}"
    if min(channels, block) < NARROWEST or max(channels, block) > WIDEST or block & (block - 1):
        return (
            f"takes {NARROWEST} to {WIDEST} channels and slots of a block, a power of two, got {channels} and {block}"
        )
    return None


def attend_blocks(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend_blocks`."""
    (batch, length), blocks = inputs.first_BR.shape, inputs.chosen_BRGN.shape[3]
    spare = (1 << (blocks - 1).bit_length()) - blocks  # backward needs a power of two of them
    # Padding becomes separate sequences, too.
    offsets_N = offsets(inputs.first_BR >= torch.arange(length, device=inputs.first_BR.device))
    # A row must see at least its own block, which is block 0 of a sequence of padding.
    idle_BR11 = (inputs.first_BR >= inputs.last_BR)[..., None, None]
    chosen_BRGN = F.pad(inputs.chosen_BRGN.masked_fill(idle_BR11, 0), (0, spare), value=-1)
    query, key, value, chosen = (x.flatten(0, 1)[None] for x in (*inputs[:3], chosen_BRGN))
    scale = query.shape[-1] ** -0.5
    out = _kernel()(
        query,
        key,
        value,
        block_indices=chosen,
        block_counts=blocks + spare,
        block_size=inputs.block,
        scale=scale,
        cu_seqlens=offsets_N,
    )
    return out[0].unflatten(0, (batch, length)).masked_fill(idle_BR11, 0)


def _kernel() -> Callable[..., Tensor]:
    """Return the library's function."""
    return importlib.import_module("fla.ops.nsa.parallel").parallel_nsa
