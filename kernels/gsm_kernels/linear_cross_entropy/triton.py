"""Linear cross-entropy in chunks of rows: three matrix products by the BLAS, and one Triton kernel between them.

    logits_RV    = hidden_RD weight_DV              BLAS, 16-bit operands, float32 result
    loss_R, grad                                    the kernel: softmax - one_hot(target), in place of the logits
    hidden_grad  = grad_RV weight_VD                BLAS
    weight_grad += grad_VR hidden_RD                BLAS, summed in float32 over the chunks

The gradients are computed with the loss, so that logits are computed once; backward multiplies them by the incoming
gradient. The host never waits for the device. So ignored rows are computed too, with gradient 0.

Precision: logits stay in float32. Rounding them to bfloat16, as Liger and a compiled `F.linear` with `F.cross_entropy`
do, has relative errors of up to 2^-9 in logits and gradients. The gradient of the logits is rounded to the dtype of the
operands for the two products that read it, both of which sum in float32. In float16 this gradient is first multiplied
by 2^15, because small probabilities would underflow. With a float32 weight and bfloat16 rows (mixed precision), the
weight is rounded to bfloat16 once per call, as `F.linear` does under autocast; its gradient stays in float32.

Alternatives: `F.linear_cross_entropy` (PyTorch 2.13) breaks a compiled graph and scales its gradients in place in
backward. Liger copies the number of targets to the host. A compiled `F.linear` with `F.cross_entropy` stores all
logits.

Source: gradients in forward, in chunks, as in Hsu et al. 2024, "Liger Kernel"; the online softmax of Milakov and
Gimelshein 2018.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..inputs import learns
from ..launch import cdiv, launch, unfit
from ..register import register
from ..rows import slices
from ..with_gradients import with_gradients

# 1,024 threads with more than 32 registers each, so that a multiprocessor runs one program, and the second pass over a
# row finds it in the L2 cache.
BLOCK, WARPS = 8192, 32


def refuses(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int = -100) -> str | None:
    """Return why the kernels cannot take this call, or None."""
    if {hidden_ND.dtype, weight_VD.dtype} == {torch.bfloat16, torch.float16}:
        return "needs rows and weight in one half-precision type, got bfloat16 and float16"
    if 0 in weight_VD.shape:
        return f"needs a vocabulary and a width, got a weight of shape {tuple(weight_VD.shape)}"
    return unfit(hidden_ND, weight_VD)


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int = -100) -> Tensor:
    """See `gsm_kernels.linear_cross_entropy`."""
    learned, wants = (hidden_ND, weight_VD), (learns(hidden_ND), learns(weight_VD))
    with torch.no_grad():
        loss_N, *grads = _operator(*learned, target_N, ignore_index, *wants)
        count = (target_N != ignore_index).sum().clamp(min=1)
        loss, factor = loss_N.sum() / count, 1 / (count * _lift(hidden_ND.dtype))
    return with_gradients(loss, learned, grads, factor)


def chunk_rows(vocabulary: int) -> int:
    """Return the number of rows in a chunk: up to 4,096, with at most 2^30 bytes of logits.

    Many rows amortise reading and writing the gradient of the weight. 4,096 rows and 2,048 columns are 256 tiles of
    128 x 256, which keep 132 multiprocessors busy for 1.94 rounds.
    """
    rows = 4096
    while rows > 256 and rows * vocabulary > 1 << 28:
        rows //= 2
    return rows


def _chunks(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of the rows, and the gradients of their sum, multiplied by `_lift`; all in float32."""
    from .kernels import loss_and_gradient

    loss_N, hidden_grad, weight_grad = _empty(hidden_ND, weight_VD, target_N, ignore_index, wants_hidden, wants_weight)
    hidden_ND, target_N = hidden_ND.contiguous(), target_N.contiguous()
    weight_VD = weight_VD.to(hidden_ND.dtype).contiguous()
    (count, _), vocabulary = hidden_ND.shape, weight_VD.shape[0]
    weight_grad.zero_()
    step = min(chunk_rows(vocabulary), count)
    logit_RV = loss_N.new_empty(step, cdiv(vocabulary, 64) * 64)  # rows begin at a multiple of 256 bytes
    grad_RV = logit_RV.view(hidden_ND.dtype)  # in the same memory
    options = {"V": vocabulary, "BLOCK": BLOCK, "GRADIENT": wants_hidden or wants_weight, "num_warps": WARPS}
    for rows in slices(count, max(step, 1)):
        size = rows.stop - rows.start
        _multiply(hidden_ND[rows], weight_VD.T, logit_RV[:size, :vocabulary])
        tensors = (logit_RV, grad_RV, target_N[rows], loss_N[rows])
        strides = (logit_RV.stride(0), grad_RV.stride(0))
        launch(loss_and_gradient, (size,), *tensors, *strides, ignore_index, _lift(hidden_ND.dtype), **options)
        if wants_hidden:
            _multiply(grad_RV[:size, :vocabulary], weight_VD, hidden_grad[rows])
        if wants_weight:
            _add_product(weight_grad, grad_RV[:size, :vocabulary].T, hidden_ND[rows])
    return loss_N, hidden_grad, weight_grad


def _empty(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the uninitialised results of `_chunks`; a gradient that is not wanted is empty."""
    shapes = hidden_ND.shape[:1], hidden_ND.shape if wants_hidden else (0,), weight_VD.shape if wants_weight else (0,)
    loss_N, hidden_grad, weight_grad = (hidden_ND.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return loss_N, hidden_grad, weight_grad


_operator = register("linear_cross_entropy", _chunks, _empty, outputs=3)


def _lift(dtype: torch.dtype) -> float:
    """Return the factor by which the gradient of the logits is multiplied, so that it does not underflow in float16."""
    return 2.0**15 if dtype == torch.float16 else 1.0


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute out = a b in float32, from 16-bit or float32 operands. On a CPU, operands are converted to float32."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b in float32."""
    if not (a.is_cuda and a.dtype != total.dtype):
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif _adds_to_float32(a.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))


@functools.cache
def _adds_to_float32(device: torch.device) -> bool:
    """Return whether `torch.addmm` can add a product of bfloat16 operands to a float32 sum; PyTorch 2.9 cannot."""
    total, half = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, half, half, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True
