"""Attention over a window and a selection from a bank as Triton kernels: when they run, their sizes, and autograd.

Forward is one kernel; a few rows without gradients, as in decoding, take two others (`few_rows.py`). A program takes a
few neighbouring queries with all their heads: they share the window's entries, every one of which is loaded once as key
and value of all heads; the online softmax (Dao et al. 2022, "FlashAttention") then goes on over the selection of one
query after the other. Rotation, scale, sink and the rotation back happen on the tile in registers. Backward recomputes
the softmax from the logarithm of its denominator, without atomics, so that it is deterministic:

1. `query_gradient` owns a few queries; per pick, it leaves what that adds to its bank slot;
2. `gsm_kernels.inverse` sums up every slot's picks, found by a stable sort of the selection;
3. `window_gradient` owns a tile of window entries and visits the rows that see it.

An entry's gradient is accumulated in float32 and rounded once a call; where several layers attend to one stream,
autograd sums over them. With W + K entries a row sees, H heads of C channels and 2 bytes a number, a row takes

                FLOPs                   HBM bytes           the floor's FLOPs and bytes
    forward     4 H C (W + K)           4 H C               the same
    backward    14 H C W + 10 H C K     16 H C + 4 C K      10 H C (W + K), 8 H C

The 8 H C above the floor are the rotated query and gradient, written and read, which saves the W / 64 + 1 programs that
read a row a rotation each; the 4 C K are what the picks add, written and read. Gathered entries come from L2: at
5.5 TB/s a tile of them takes as long as its products with 73 rows at 798 TFLOP/s. So the 64 rows that wgmma asks for
cost no more than the gather, even where (H < 64) the rows of other queries than the one that picked are masked.
All of this is derived, not measured.

Why our own: no library has one entry as key and value of all heads, two sources, a sink, and their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..inverse import add_segments, inverse_index
from ..launch import build_once, launch, power_of_two, unfit
from .few_rows import few_rows, splits
from .inputs import INPUTS, LOG2_E, Inputs

PAIR_BYTES = 1 << 29  # the picks' contributions that exist at a time


class Tile(NamedTuple):
    """How a kernel is cut and launched: QUERIES x HEADS rows, BLOCK entries."""

    QUERIES: int
    HEADS: int
    BLOCK: int
    num_warps: int
    num_stages: int


def tile(kernel: str, inputs: Inputs) -> Tile:
    """The tile of a kernel for these heads, channels and dtype.

    wgmma takes 64 rows on its left: of queries forward, of entries backward. An SM holds two programs of four warps if
    each takes at most 113 KB of shared memory (their threads have 255 registers), or one of eight. A gathered tile is
    on its way while another is computed with five stages, since its slots have to be there before it. float32 is not
    for wgmma, and takes twice the registers.
    """
    heads, channels = inputs.query_BRHC.shape[2:]
    padded, picks, wide = power_of_two(heads), inputs.slots > 0, channels > 128
    if inputs.query_BRHC.dtype == torch.float32:
        rows, block, warps, stages = 32, 32, 8, 1
    elif kernel == "forward":
        rows, block, warps, stages = (64, 64, 4, 5) if picks else (128, 64, 8, 3)
    elif kernel == "query_gradient":
        rows, block, warps, stages = (32, 64, 4, 5 if padded <= 32 else 3) if picks else (64, 64, 4, 3)
    else:
        rows, block, warps, stages = 64, 64, 4, 2
    rows = rows // 2 if wide and kernel != "forward" else rows
    return Tile(max(rows // padded, 1), padded, block, warps, min(stages, 2) if wide else stages)


def refuses(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    bank_BFC: Tensor | None = None,
    index_BRK: Tensor | None = None,
    bias_BRK: Tensor | None = None,
) -> str | None:
    """Why this call is not for the kernels."""
    heads, channels = query_BRHC.shape[2:]
    if channels not in (16, 32, 64, 128, 256):
        return f"made for 16, 32, 64, 128 or 256 channels, got {channels}"
    if channels == 256 and query_BRHC.dtype == torch.float32:
        return "made for at most 128 channels in float32, got 256"
    if not 1 <= heads <= 64:
        return f"made for 1 to 64 heads, got {heads}"
    floats = (query_BRHC, window_BEC, sink_H, cos_BRP, sin_BRP, bank_BFC, bias_BRK)
    return unfit(*(x for x in floats if x is not None))


def attend(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    bank_BFC: Tensor | None = None,
    index_BRK: Tensor | None = None,
    bias_BRK: Tensor | None = None,
) -> Tensor:
    """See `gsm_kernels.attend`; without a bank, `gsm_kernels.attend_band`."""
    far = (bank_BFC, bias_BRK, index_BRK)
    inputs = Inputs(query_BRHC, window_BEC, sink_H, *far, position_BR, cos_BRP, sin_BRP, width)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:5])
    if not learns and (shares := splits(inputs)) > 1:
        return few_rows(*inputs, shares)
    if learns:
        inputs = inputs.in_one_dtype()
    if query_BRHC.numel() and learns:
        by_16 = query_BRHC.shape[1] % 16 == 0
        key = ("attend", query_BRHC.device, query_BRHC.dtype, by_16, *inputs.constants().values())
        # Divided by 16 or not, as the rows themselves: kernels are built for that, too.
        few = inputs.first_rows(64 if by_16 else 63)
        lse_BRH = few.query_BRHC.new_empty(few.query_BRHC.shape[:3], dtype=torch.float32)
        build_once(key, lambda: _backward(few.query_BRHC, few.query_BRHC, lse_BRH, *few))
    return _forward(*inputs)[0]


@torch.library.custom_op("gsm_kernels::attend", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)")
def _forward(*arguments):
    """The output, and the logarithm to base 2 of each row's softmax denominator, float32 [B,R,H]."""
    from .forward import forward

    inputs = Inputs(*arguments).contiguous()
    out_BRHC, lse_BRH = _outputs(*arguments)
    cut = tile("forward", inputs)
    launch(
        forward,
        (inputs.query_BRHC.shape[0] * -(-inputs.query_BRHC.shape[1] // cut.QUERIES),),
        *inputs.read(),
        inputs.sink_H,
        out_BRHC,
        lse_BRH,
        *inputs.sizes(),
        **inputs.constants(),
        **cut._asdict(),
    )
    return out_BRHC, lse_BRH


@torch.library.custom_op(
    "gsm_kernels::attend_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(grad_BRHC, out_BRHC, lse_BRH, *arguments):
    """The gradients of the first five inputs; without elements where there is no bank or bias."""
    inputs = Inputs(*arguments).contiguous()
    grads = _empty_gradients(grad_BRHC, out_BRHC, lse_BRH, *arguments)
    query_grad, window_grad, sink_grad, bank_grad, bias_grad = grads
    bank_sum = torch.zeros_like(bank_grad, dtype=torch.float32)
    bias_grad.zero_()
    turned_query, turned_grad, delta_BRH = (torch.empty_like(x) for x in (query_grad, query_grad, lse_BRH))
    saved = (grad_BRHC.to(query_grad.dtype).contiguous(), out_BRHC, lse_BRH)
    written = (delta_BRH, turned_query, turned_grad, query_grad, bias_grad)
    for start, stop in _row_chunks(inputs):
        _add_pairs(inputs, _query_gradient(inputs, saved, written, start, stop), bank_sum, start, stop)
    _window_gradient(inputs, turned_query, turned_grad, lse_BRH, delta_BRH, window_grad)
    sink_share = torch.exp2(inputs.sink_H.to(torch.float32) * LOG2_E - lse_BRH)
    sink_grad.copy_(-(sink_share * delta_BRH).sum((0, 1)))
    bank_grad.copy_(bank_sum)
    return grads


def _row_chunks(inputs: Inputs) -> list[tuple[int, int]]:
    """Ranges of rows whose picks' contributions are at most PAIR_BYTES."""
    batch, rows, _, channels = inputs.query_BRHC.shape
    queries = tile("query_gradient", inputs).QUERIES
    bytes_a_row = batch * inputs.picks * channels * inputs.query_BRHC.element_size() if inputs.slots else 0
    step = max(PAIR_BYTES // bytes_a_row // queries * queries, queries) if bytes_a_row else max(rows, 1)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _query_gradient(inputs: Inputs, saved: tuple, written: tuple, start: int, stop: int) -> Tensor:
    """Fill in the gradients of these rows; return what their picks add to the bank's, [B, rows, K, C]."""
    from .backward import query_gradient

    batch, _, _, channels = inputs.query_BRHC.shape
    cut = tile("query_gradient", inputs)
    picks = inputs.picks if inputs.slots else 0
    pair_grads = inputs.query_BRHC.new_empty(batch, stop - start, picks, channels)
    launch(
        query_gradient,
        (batch * -(-(stop - start) // cut.QUERIES),),
        *inputs.read(),
        *saved,
        *written,
        pair_grads,
        start,
        stop,
        *inputs.sizes(),
        **inputs.constants(),
        **cut._asdict(),
    )
    return pair_grads


def _window_gradient(inputs: Inputs, query: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, written: Tensor) -> None:
    from .backward import window_gradient

    batch, entries, channels = inputs.window_BEC.shape
    cut = tile("window_gradient", inputs)
    launch(
        window_gradient,
        (batch * -(-entries // cut.BLOCK),),
        query,
        grad,
        inputs.window_BEC,
        inputs.position_BR,
        lse,
        delta,
        written,
        *inputs.sizes()[:4],
        H=query.shape[2],
        C=channels,
        **cut._asdict(),
    )


def _add_pairs(inputs: Inputs, pair_grads: Tensor, bank_sum: Tensor, start: int, stop: int) -> None:
    """Add the picks' contributions to the bank's gradient, each slot's in the order of the rows."""
    if inputs.index_BRK is not None and inputs.slots:
        channels = bank_sum.shape[2]
        inverse = inverse_index(inputs.index_BRK[:, start:stop], inputs.slots)
        add_segments(bank_sum.view(-1, channels), pair_grads.view(-1, channels), inverse)


def _outputs(*arguments):
    """Uninitialised; what `_forward` returns of tensors without data."""
    query = arguments[0]
    out_BRHC = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out_BRHC, query.new_empty(query.shape[:3], dtype=torch.float32)


def _empty_gradients(grad_BRHC, out_BRHC, lse_BRH, *arguments):
    """Uninitialised; what `_backward` returns of tensors without data."""
    given = (grad_BRHC.new_empty(0) if x is None else x for x in arguments[:5])
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.width = inputs
    ctx.save_for_backward(*output, *tensors)


def _gradients(ctx, grad_BRHC, _):
    saved = ctx.saved_tensors  # once: where activations are recomputed, a second look is an error
    grads, given = _backward(grad_BRHC, *saved, ctx.width), saved[2:7]
    return *(None if x is None else grad for x, grad in zip(given, grads, strict=True)), *(None,) * 5


_forward.register_fake(_outputs)
_backward.register_fake(_empty_gradients)
_forward.register_autograd(_gradients, setup_context=_keep)
