"""The attention of `gsm_kernels.attend_blocks` by the kernels of flash-linear-attention (extra `fla`), on a GPU.

Its kernels know no ranges but sequences laid end to end, with blocks counted from the first token of each, as here from
the first of a document. How many there are only the device knows, so a call waits for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import absent, for_a_graph, needs_one_half_type
from .inputs import Inputs

SHARED = 16  # query heads that share a key head, at least; a power of two
NARROWEST, WIDEST = 16, 256  # channels of a head, and slots of a block


def missing() -> str | None:
    """Why these kernels can take no call at all."""
    if torch.compiler.is_compiling():
        return "cannot be traced into a graph"
    return absent("fla", "fla.ops.nsa.parallel")


def refuses(inputs: Inputs) -> str | None:
    """Why these kernels cannot take this call."""
    if inputs.query_BRHC.device.type != "cuda":
        return f"needs tensors on a GPU, got {inputs.query_BRHC.device.type}"
    refusal = needs_one_half_type(*inputs[:3]) or _wrong_sizes(inputs)
    if refusal is not None:
        return refusal
    if not inputs.own:
        return "needs the rows to be the slots: it has no memory"
    return "waits for the device, which a CUDA graph cannot" if for_a_graph() else None


def _wrong_sizes(inputs: Inputs) -> str | None:
    """Why these kernels are not for such heads or blocks."""
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
    spare = (1 << (blocks - 1).bit_length()) - blocks  # in backward there must be a power of two of them
    cut_BT = inputs.first_BR >= torch.arange(length, device=inputs.first_BR.device)  # padding is cut off as well
    cut_BT[:, 0] = True
    first_N = cut_BT.flatten().nonzero()[:, 0]
    # A kernel's row sees at least its own block, the first one of what has been cut off.
    idle_BR11 = (inputs.first_BR >= inputs.last_BR)[..., None, None]
    chosen_BRGN = F.pad(inputs.chosen_BRGN.masked_fill(idle_BR11, 0), (0, spare), value=-1)
    query, key, value, chosen = (x.flatten(0, 1)[None] for x in (*inputs[:3], chosen_BRGN))
    offsets_N = torch.cat((first_N, first_N.new_tensor([batch * length])))
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
    """The library's function."""
    return importlib.import_module("fla.ops.nsa.parallel").parallel_nsa
