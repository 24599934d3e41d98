"""Attention over a window and a selection from a bank as Triton kernels: conditions, sizes, launches and autograd.

Forward is one kernel; a few rows without gradients, as in decoding, use two others (`few_rows`). A program computes all
heads of a few neighbouring queries. It loads each window entry once, as key and value of all heads. The online softmax
(Dao et al. 2022, "FlashAttention") then continues with the selection of one query after the other. Rotation, scale,
sink and the inverse rotation are applied to the tile in registers.

Backward recomputes the softmax from the logarithm of its denominator. It uses no atomics and is deterministic:

1. `query_gradient` takes a few queries; for each pick, it stores the contribution to the gradient of its bank slot;
2. `gsm_kernels.inverse` sums the contributions to every slot, chunk by chunk of rows;
3. `window_gradient` takes a tile of window entries, and reads the rows that see it;
4. `sink_gradient` sums over all rows, for 8 heads per program.

The gradient of an entry is accumulated in float32 and stored in the dtype of the entry. `query_gradient` stores the
rotated query and gradient, so that `window_gradient` does not rotate. wgmma needs 64 rows; with fewer heads a tile has
several queries, and the rows of other queries are masked while one query's picks are computed. That costs no more
time than the gather.

As of writing, no library has this attention: one entry as key and value of all heads, two sources, a sink, gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import in_dtype
from ..inputs import contiguous, learns, schema
from ..inverse import add_segments, inverse_index
from ..launch import cdiv, in_float32, launch, power_of_two, unfit
from ..register import register
from ..rows import Rows, slices
from ..tiles import PROCESSORS, launch_fastest
from .inputs import LEARNED, Inputs

LOG2_E = 1.4426950408889634
PAIR_BYTES = 1 << 29  # largest buffer of the picks' contributions to the bank's gradient, in bytes
SHARE = 32  # columns per program of `few_rows`


def tile(inputs: Inputs, stages: int, block: int = 64, rows: int = 64) -> dict[str, int]:
    """Return the options of a tile with QUERIES x HEADS rows and BLOCK entries.

    wgmma takes 64 rows as its left operand: queries in forward, entries in backward. A multiprocessor runs two programs
    of four warps if each uses at most 113 KB of shared memory, or one program of eight warps. To load gathered entries
    during the computation of others takes five stages, because their slots are loaded first. float32 cannot use wgmma,
    and takes twice the registers.
    """
    padded, warps = power_of_two(inputs.query_BRHC.shape[2]), 4
    if inputs.query_BRHC.dtype == torch.float32:
        rows, block, warps, stages = 32, 32, 8, 1
    queries = max(rows // padded, 1)
    return {"QUERIES": queries, "HEADS": padded, "BLOCK": block, "num_warps": warps, "num_stages": stages}


def _query_tile(inputs: Inputs) -> dict[str, int]:
    """Return the tile of `query_gradient`."""
    few = inputs.query_BRHC.shape[2] <= 32
    return tile(inputs, 5 if few else 3, rows=32) if inputs.slots else tile(inputs, 3)


def refuses(inputs: Inputs) -> str | None:
    """Return why the kernels cannot take this call, or None."""
    heads, channels = inputs.query_BRHC.shape[2:]
    if channels not in (16, 32, 64, 128):
        return f"made for 16, 32, 64 or 128 channels, got {channels}"
    if not 1 <= heads <= 64:
        return f"made for 1 to 64 heads, got {heads}"
    query, window, sink, bank, bias = inputs.learned
    tensors = (query, window, sink, inputs.cos_BRP, inputs.sin_BRP, bank, bias)
    return unfit(*(x for x in tensors if x is not None)) or in_float32(inputs.query_BRHC)


def attend(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.attend` and `gsm_kernels.attend_band`."""
    if not learns(*inputs.learned) and (shares := splits(inputs)) > 1:
        return _few_rows(*inputs, shares)
    return _operator(*inputs)[0]


def _readable(inputs: Inputs) -> Inputs:
    """Return contiguous inputs, with window and bank in the dtype of the queries, as `tl.dot` needs them."""
    bank, dtype = inputs.bank_BFC, inputs.query_BRHC.dtype
    window = in_dtype(inputs.window_BEC, dtype)
    return contiguous(inputs._replace(window_BEC=window, bank_BFC=None if bank is None else in_dtype(bank, dtype)))


# Arguments of `forward`, `split` and `query_gradient`, in order: `_read`, the outputs, `_sizes`, `_constants`.


def _read(inputs: Inputs) -> tuple[Tensor | None, ...]:
    far = (inputs.bank_BFC, inputs.index_BRK, inputs.bias_BRK)
    return inputs.query_BRHC, inputs.window_BEC, *far, inputs.position_BR, inputs.cos_BRP, inputs.sin_BRP


def _sizes(inputs: Inputs) -> tuple[float | int, ...]:
    """Return the scale of a logit in base 2, width, R, E, F, K."""
    rows, _, channels = inputs.query_BRHC.shape[1:]
    return channels**-0.5 * LOG2_E, inputs.width, rows, inputs.window_BEC.shape[1], inputs.slots, inputs.picks


def _constants(inputs: Inputs) -> dict[str, int | bool]:
    heads, channels = inputs.query_BRHC.shape[2:]
    sizes = {"H": heads, "C": channels, "PAIRS": inputs.cos_BRP.shape[2]}
    picks = inputs.slots > 0
    return sizes | {"PICKS": picks, "BIASED": picks and inputs.bias_BRK is not None}


def _forward(*arguments):
    """Compute the output, and the base-2 logarithm of each row's softmax denominator, float32 [B,R,H]."""
    from .kernels import forward

    inputs = _readable(Inputs(*arguments))
    out_BRHC, lse_BRH = _outputs(*arguments)
    batch, rows = inputs.query_BRHC.shape[:2]
    arguments = (*_read(inputs), inputs.sink_H, out_BRHC, lse_BRH, *_sizes(inputs))
    several = tile(inputs, 5 if inputs.slots else 4), tile(inputs, 5, block=32)
    programs = batch * cdiv(rows, several[0]["QUERIES"])
    candidates = tuple(dict.fromkeys(tuple(sizes.items()) for sizes in several))
    launch_fastest("attend.forward", forward, lambda _: (programs,), arguments, candidates, **_constants(inputs))
    return out_BRHC, lse_BRH


def splits(inputs: Inputs) -> int:
    """Return the number of programs per row for `few_rows`; 1 if there are enough rows to use all multiprocessors."""
    batch, rows = inputs.query_BRHC.shape[:2]
    columns = inputs.width + (inputs.picks if inputs.slots else 0)
    return max(1, min(cdiv(columns, SHARE), PROCESSORS // max(batch * rows, 1)))


def few_rows(*arguments):
    """Compute the output for a few rows without gradients.

    With one program per row, a single token would use one of 132 multiprocessors. So the columns of a row are divided
    among several programs, and a second kernel joins their results. Sizes depend only on shapes, so that a CUDA graph
    can contain both kernels.

    Args:
        arguments: the fields of `Inputs`, then the number of shares of each row's columns.

    Source: "Flash-Decoding" (Dao et al. 2023).
    """
    from .kernels import join, split

    *fields, shares = arguments
    inputs = contiguous(Inputs(*fields))
    batch, rows, heads, channels = inputs.query_BRHC.shape
    padded = power_of_two(heads, 16)  # smallest size of a matrix product
    out_BRHC = torch.empty_like(inputs.query_BRHC)
    high, total = inputs.query_BRHC.new_empty(2, batch * rows * shares, padded, dtype=torch.float32)
    mixed = high.new_empty(*high.shape, channels)
    cut = {"HEADS": padded, "SPLITS": shares, "num_warps": 4}
    constants = _constants(inputs)
    tensors = (*_read(inputs), high, total, mixed)
    launch(split, (batch * rows * shares,), *tensors, *_sizes(inputs), **constants, **cut, BLOCK=SHARE, num_stages=2)
    tensors = (high, total, mixed, inputs.sink_H, inputs.cos_BRP, inputs.sin_BRP, out_BRHC)
    constants = {name: constants[name] for name in ("H", "C", "PAIRS")}
    launch(join, (batch * rows,), *tensors, rows, **constants, **cut)
    return out_BRHC


def _backward(grad_BRHC, out_BRHC, lse_BRH, *arguments):
    """Return the gradients of `Inputs.learned`, empty for a bank or bias that is None."""
    inputs = Inputs(*arguments)
    like = (grad_BRHC.new_empty(0) if x is None else x for x in inputs.learned)
    inputs = _readable(inputs)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
    query_grad, window_grad, sink_grad, bank_grad, bias_grad = grads
    bank_sum = torch.zeros_like(bank_grad, dtype=torch.float32)
    bias_grad.zero_()
    turned_query, turned_grad, delta_BRH = (torch.empty_like(x) for x in (query_grad, query_grad, lse_BRH))
    saved = (grad_BRHC.to(query_grad.dtype).contiguous(), out_BRHC, lse_BRH)
    written = (delta_BRH, turned_query, turned_grad, query_grad, bias_grad)
    for rows in _row_chunks(inputs):
        pair_grads = _query_gradient(inputs, saved, written, rows)
        if inputs.index_BRK is not None and inputs.slots:
            part = Rows(0, len(inputs.index_BRK), rows.start, rows.stop - rows.start)
            inverse = inverse_index(inputs.index_BRK, inputs.slots, part)
            add_segments(bank_sum.flatten(0, 1), pair_grads.flatten(0, 2), inverse)
        del pair_grads  # before the next chunk allocates its own
    _window_gradient(inputs, turned_query, turned_grad, lse_BRH, delta_BRH, window_grad)
    _sink_gradient(inputs.sink_H, lse_BRH, delta_BRH, sink_grad)
    bank_grad.copy_(bank_sum)
    return grads


def _row_chunks(inputs: Inputs) -> list[slice]:
    """Return ranges of rows whose picks' contributions take at most PAIR_BYTES."""
    batch, rows, _, channels = inputs.query_BRHC.shape
    queries = _query_tile(inputs)["QUERIES"]
    bytes_a_row = batch * inputs.picks * channels * inputs.query_BRHC.element_size() if inputs.slots else 0
    step = max(PAIR_BYTES // bytes_a_row // queries * queries, queries) if bytes_a_row else max(rows, 1)
    return slices(rows, step)


def _query_gradient(inputs: Inputs, saved: tuple, written: tuple, rows: slice) -> Tensor:
    """Write the gradients of these rows; return their picks' contributions to the bank's gradient, [B,rows,K,C]."""
    from .kernels import query_gradient

    batch, _, _, channels = inputs.query_BRHC.shape
    length = rows.stop - rows.start
    pair_grads = inputs.query_BRHC.new_empty(batch, length, inputs.picks if inputs.slots else 0, channels)
    arguments = (*_read(inputs), *saved, *written, pair_grads, rows.start, rows.stop, *_sizes(inputs))
    sizes = _query_tile(inputs)
    launch(query_gradient, (batch * cdiv(length, sizes["QUERIES"]),), *arguments, **_constants(inputs), **sizes)
    return pair_grads


def _window_gradient(inputs: Inputs, query: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, written: Tensor) -> None:
    from .kernels import window_gradient

    (batch, entries, channels), heads = inputs.window_BEC.shape, query.shape[2]
    tensors = (query, grad, inputs.window_BEC, inputs.position_BR, lse, delta, written)
    sizes = tile(inputs, 2)
    grid = (batch * cdiv(entries, sizes["BLOCK"]),)
    launch(window_gradient, grid, *tensors, *_sizes(inputs)[:4], H=heads, C=channels, **sizes)


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor, written: Tensor) -> None:
    from .kernels import sink_gradient

    heads, sizes = sink.numel(), {"ROWS": 1024, "HEADS": 8, "num_warps": 8}
    rows = lse.numel() // max(heads, 1)
    launch(sink_gradient, (cdiv(heads, 8),), sink, lse, delta, written, rows, H=heads, **sizes)


def _outputs(*arguments):
    """Return uninitialised outputs of `_forward`."""
    query = arguments[0]
    out_BRHC = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out_BRHC, query.new_empty(query.shape[:3], dtype=torch.float32)


TAKES = schema(Inputs)
_operator = register("attend", _forward, _outputs, _backward, learned=LEARNED, takes=TAKES, outputs=2, saved=2)
_few_rows = register("attend_few_rows", few_rows, takes=f"{TAKES}, int shares")
