"""A separate linear map for each group of rows, for a mixture of experts.

Rows are sorted by group: the rows of group e are [end_{e-1}, end_e). Then

    y_m = weight_e x_m    for every row m of group e

Args:
    x_MD: the rows.
    weight_END: one matrix for each of E groups, with D inputs and N outputs.
    end_E: int32, one past the last row of each group, ascending; the last is M. A group may be empty.

Returns:
    y_MN in the dtype of x, which the weights share. Differentiable in x and weight; an empty group gets gradients of 0.

Raises:
    ValueError: if the shapes do not fit.

Source: the grouped matrix products of dropless mixtures of experts (Gale et al. 2023, MegaBlocks).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gsm_kernels import Impl, Op
from gsm_kernels.device import HOPPER, for_a_graph, full_precision, no_nvidia_gpu
from gsm_kernels.shapes import agree

ALIGNED = 8  # numbers of 2 bytes in the 16 bytes that a row must be a multiple of


# The reference runs one product after the other. So on a GPU the host waits for the group sizes; in a CUDA graph, where
# it cannot wait, every matrix is applied to all rows. Two custom operators hide the loop from tracing: outside of them,
# no shape depends on a group size.
@torch.library.custom_op("gsm_kernels::grouped_products", mutates_args=())
def _products(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> Tensor:
    """Return y_MN: the rows of each group times its matrix."""
    with full_precision(x_MD):
        if for_a_graph():
            return _each_by_all(x_MD, weight_END, end_E)
        return torch.cat([x @ weight.T for x, weight in zip(_groups(x_MD, end_E), weight_END, strict=True)])


@torch.library.custom_op("gsm_kernels::grouped_outer_products", mutates_args=())
def _outer_products(y_MN: Tensor, x_MD: Tensor, end_E: Tensor) -> Tensor:
    """Return one matrix [N, D] for each group: the sum of the outer products of its rows."""
    with full_precision(x_MD):
        return torch.stack([y.T @ x for y, x in zip(_groups(y_MN, end_E), _groups(x_MD, end_E), strict=True)])


def _each_by_all(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> Tensor:
    """Compute the same without waiting for ``end_E``: apply every matrix to all rows, and keep those of its group."""
    row_M1 = torch.arange(len(x_MD), device=x_MD.device)[:, None]
    y_MN, start = x_MD.new_zeros(len(x_MD), weight_END.shape[1]), end_E.new_zeros(())
    for weight, end in zip(weight_END, end_E, strict=True):
        y_MN, start = torch.where((row_M1 >= start) & (row_M1 < end), x_MD @ weight.T, y_MN), end
    return y_MN


def _groups(x_MD: Tensor, end_E: Tensor) -> tuple[Tensor, ...]:
    return x_MD.split(end_E.diff(prepend=end_E.new_zeros(1)).tolist())


@_products.register_fake
def _(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> Tensor:
    return x_MD.new_empty(x_MD.shape[0], weight_END.shape[1])


@_outer_products.register_fake
def _(y_MN: Tensor, x_MD: Tensor, end_E: Tensor) -> Tensor:
    return x_MD.new_empty(end_E.shape[0], y_MN.shape[1], x_MD.shape[1])


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
    x_MD, weight_END, end_E = ctx.saved_tensors
    x_grad = _products(grad_MN, weight_END.mT, end_E) if ctx.needs_input_grad[0] else None
    weight_grad = _outer_products(grad_MN, x_MD, end_E) if ctx.needs_input_grad[1] else None
    return x_grad, weight_grad, None


_products.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula([torch.ops.gsm_kernels.grouped_products, torch.ops.gsm_kernels.grouped_outer_products])
def _flops(first: tuple[int, ...], second: tuple[int, ...], *_: object, **__: object) -> int:
    """Return the FLOPs of either operator: every row is multiplied with one matrix."""
    return 2 * first[0] * first[-1] * (second[1] if len(second) == 3 else second[-1])


def _no_grouped_mm() -> str | None:
    """Return why ``torch._grouped_mm`` cannot be used on this machine, or None."""
    if (refusal := no_nvidia_gpu()) is not None:
        return f"torch._grouped_mm {refusal}"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != HOPPER:
        return f"torch._grouped_mm is trusted on compute capability 9.0 alone, this is {major}.{minor}"
    return None


def _unfit_for_grouped_mm(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> str | None:
    """Return why ``torch._grouped_mm`` cannot run this call, or None."""
    if not x_MD.is_cuda:
        return f"needs tensors on a GPU, got {x_MD.device.type}"
    if {x_MD.dtype, weight_END.dtype} != {torch.bfloat16}:
        return f"needs bfloat16, got {x_MD.dtype} and {weight_END.dtype}"
    if weight_END.shape[1] % ALIGNED or weight_END.shape[2] % ALIGNED:
        return f"needs widths that are multiples of {ALIGNED}, got {weight_END.shape[2]} and {weight_END.shape[1]}"
    return None


def _grouped_mm(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> Tensor:
    """Run PyTorch's grouped matrix product: one launch for all groups, whose ends stay on the device.

    On compute capability 9.0 it is a CUTLASS kernel that does not wait for the host. It needs rows of a multiple of 16
    bytes; group sizes are arbitrary. (On newer GPUs, wrong gradients of empty groups have been reported,
    pytorch/pytorch issue 172439; on older ones it is a loop that waits for the ends.)
    """
    return torch._grouped_mm(x_MD.contiguous(), weight_END.contiguous().mT, offs=end_E)


grouped_linear = Op(
    "grouped_linear",
    _products,
    (Impl("grouped_mm", _grouped_mm, _unfit_for_grouped_mm, _no_grouped_mm),),
    check=lambda x_MD, weight_END, end_E: agree("grouped_linear", x_MD=x_MD, weight_END=weight_END, end_E=end_E),
    doc=__doc__,
)
