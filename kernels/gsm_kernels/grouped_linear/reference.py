"""One product after the other, in the dtype that comes in.

Group sizes have to be known for that, so on a GPU the host waits for them; only in a CUDA graph, where it cannot, does
every matrix meet all rows. Two custom operators hide the loop from tracing: outside of them, no shape depends on a
size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..device import for_a_graph, full_precision


def grouped_linear(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> Tensor:
    """See `gsm_kernels.grouped_linear`."""
    return _products(x_MD, weight_END, end_E)


@torch.library.custom_op("gsm_kernels::grouped_products", mutates_args=())
def _products(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> Tensor:
    """y_MN: the rows of each group times its matrix."""
    with full_precision(x_MD):
        if for_a_graph():
            return _each_by_all(x_MD, weight_END, end_E)
        return torch.cat([x @ weight.T for x, weight in zip(_groups(x_MD, end_E), weight_END, strict=True)])


@torch.library.custom_op("gsm_kernels::grouped_outer_products", mutates_args=())
def _outer_products(y_MN: Tensor, x_MD: Tensor, end_E: Tensor) -> Tensor:
    """One matrix [N, D] for each group: the sum of its rows' outer products."""
    with full_precision(x_MD):
        return torch.stack([y.T @ x for y, x in zip(_groups(y_MN, end_E), _groups(x_MD, end_E), strict=True)])


def _each_by_all(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> Tensor:
    """Compute the same without waiting for the ends: every matrix is applied to all rows, and its own are kept."""
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
    """Return the FLOPs of either op: every row is multiplied with one matrix."""
    return 2 * first[0] * first[-1] * (second[1] if len(second) == 3 else second[-1])
