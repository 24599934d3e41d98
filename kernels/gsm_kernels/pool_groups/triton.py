"""Pooling in one kernel forward and one backward.

Bytes, for S tokens and F = S / ratio groups of C channels in bfloat16: forward 4 C S (values and gates once) + 2 C F,
which is the floor. Backward 8 C S + 2 C F, and 4 C S more to fill both gradients with zeros first, for tokens outside
of all groups: the tail of a document, padding. A token is in at most one group, so each gradient is written once, by
the program of its group, without atomics.

The values and gates of a `Compressor` are two halves of one projection; this kernel reads them where they lie. It also
replaces a dozen kernels of the reference. torch.compile fuses some of these, but cannot know that groups are disjoint:
the gradient of its gather is an `index_add`, with atomics. No library has this pooling.
"""

from __future__ import annotations

from torch import Tensor

from ..launch import cdiv, launch, power_of_two, unfit
from ..register import register

LONGEST = 16  # tokens of a group: read one after the other by one program


def refuses(value_BSC: Tensor, gate_BSC: Tensor | None, end_BF: Tensor, ratio: int) -> str | None:
    """Return why this call is not for the kernels."""
    if ratio > LONGEST:
        return f"pools at most {LONGEST} tokens, got ratio = {ratio}"
    return unfit(value_BSC) if gate_BSC is None else unfit(value_BSC, gate_BSC)


def pool_groups(value_BSC: Tensor, gate_BSC: Tensor | None, end_BF: Tensor, ratio: int) -> Tensor:
    """See `gsm_kernels.pool_groups`."""
    return _operator(value_BSC, None if ratio == 1 else gate_BSC, end_BF, ratio)


def tile(channels: int) -> tuple[int, int]:
    """Groups and channels of a program: 16 numbers for each of its 128 threads, the channels side by side."""
    block = min(128, power_of_two(channels))
    return 2048 // block, block


def _forward(value: Tensor, gate: Tensor | None, end: Tensor, ratio: int) -> Tensor:
    from .kernels import forward

    value, gate, strides = _readable(value, gate)
    out = value.new_empty(*end.shape, value.shape[2])
    grid, options = _grid(end, value.shape[2], ratio)
    launch(forward, grid, value, gate, end.contiguous(), out, *strides, end.shape[1], end.numel(), **options)
    return out


def _backward(grad: Tensor, value: Tensor, gate: Tensor | None, end: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    from .kernels import backward

    value_grad = value.new_zeros(value.shape)
    gate_grad = value.new_zeros(0) if gate is None else gate.new_zeros(gate.shape)
    value, gate, strides = _readable(value, gate)
    grid, options = _grid(end, value.shape[2], ratio)
    tensors = (grad.contiguous(), value, gate, end.contiguous(), value_grad, gate_grad)
    launch(backward, grid, *tensors, *strides, end.shape[1], end.numel(), value.shape[1], **options)
    return value_grad, gate_grad


def _readable(value: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Values and gates with channels side by side, and their strides by sequence and token; values stand in for gates
    that are not there."""
    value = value if value.stride(2) == 1 else value.contiguous()
    gate = value if gate is None else gate if gate.stride(2) == 1 else gate.contiguous()
    return value, gate, (*value.stride()[:2], *gate.stride()[:2])


def _grid(end: Tensor, channels: int, ratio: int) -> tuple[tuple[int, int], dict[str, int]]:
    groups, block = tile(channels)
    options = {"C": channels, "RATIO": ratio, "ROWS": groups, "BLOCK": block, "num_warps": 4}
    return (cdiv(end.numel(), groups), cdiv(channels, block)), options


def _shape(value: Tensor, gate: Tensor | None, end: Tensor, ratio: int) -> Tensor:
    return value.new_empty(*end.shape, value.shape[2])


_operator = register("pool_groups", _forward, _shape, _backward, learned=("value", "gate"))
