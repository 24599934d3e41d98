"""Linear cross-entropy in chunks of rows: three products by the BLAS, and one kernel between them.

    logits_RV    = hidden_RD weight_DV              BLAS, half-precision operands, float32 result
    loss_R, grad                                    the kernel: softmax - one at the target, over the logits
    hidden_grad  = grad_RV weight_VD                BLAS
    weight_grad += grad_VR hidden_RD                BLAS, added up in float32 over the chunks

The gradients are made with the loss, so that logits are computed once; backward multiplies them by the loss's gradient.
Nothing waits for the device: ignored rows take part with gradient 0, since leaving them out needs their number.

The operands are rounded, the logits are not: bfloat16 logits (as in Liger and in a compiled `F.linear` with
`F.cross_entropy`) are up to 2^-9 off, and so are probability and gradient. The gradient of the logits is rounded to the
operands' dtype for the two products that read it; both of these sum in float32. float16 has too few small numbers for
probabilities, so they are multiplied by 2^15 there. A float32 weight with bfloat16 rows (mixed-precision training) is
rounded to bfloat16 once a call, as `F.linear` does under autocast. The weight's gradient stays float32.

PyTorch's own (`F.linear_cross_entropy`, from 2.13, in chunks) breaks a compiled graph and scales its gradients in place
in backward. Liger reads the number of targets back to the host. A compiled `F.linear` with `F.cross_entropy` holds all
logits.

Source: the gradient made in forward, in chunks, is Liger's (Hsu et al. 2024, "Liger Kernel"); the online softmax is
Milakov and Gimelshein's (2018).
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

# 1,024 threads with more than 32 registers each: one program on a processor, so that the second sweep over a row finds
# it in the L2 cache.
BLOCK, WARPS = 8192, 32


def refuses(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int = -100) -> str | None:
    """Return why this call is not for the kernels."""
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
    """Return the rows of a chunk: up to 4,096, with at most 2^30 bytes of logits.

    Many rows amortise reading and writing the weight's gradient. A power of two fills the device in the product with
    D columns: 4,096 x 2,048 are 256 tiles of 128 x 256 for 132 processors, 1.94 rounds.
    """
    rows = 4096
    while rows > 256 and rows * vocabulary > 1 << 28:
        rows //= 2
    return rows


def _chunks(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of the rows, and the gradients of their sum, times `_lift`; all in float32."""
    from .kernels import loss_and_gradient

    loss_N, hidden_grad, weight_grad = _empty(hidden_ND, weight_VD, target_N, ignore_index, wants_hidden, wants_weight)
    hidden_ND, target_N = hidden_ND.contiguous(), target_N.contiguous()
    weight_VD = weight_VD.to(hidden_ND.dtype).contiguous()
    (count, _), vocabulary = hidden_ND.shape, weight_VD.shape[0]
    weight_grad.zero_()
    step = min(chunk_rows(vocabulary), count)
    logit_RV = loss_N.new_empty(step, cdiv(vocabulary, 64) * 64)  # rows begin at a multiple of 256 bytes
    grad_RV = logit_RV.view(hidden_ND.dtype)  # over the same memory
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
    """Results of `_chunks` without data; a gradient that is not wanted has no elements."""
    shapes = hidden_ND.shape[:1], hidden_ND.shape if wants_hidden else (0,), weight_VD.shape if wants_weight else (0,)
    loss_N, hidden_grad, weight_grad = (hidden_ND.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return loss_N, hidden_grad, weight_grad


_operator = register("linear_cross_entropy", _chunks, _empty, outputs=3)


def _lift(dtype: torch.dtype) -> float:
    """Return a factor for the gradient of the logits: with it, small probabilities are numbers of this dtype."""
    return 2.0**15 if dtype == torch.float16 else 1.0


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b in float32, from half-precision or float32 operands. On a CPU a product has one dtype."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b in float32."""
    if not (a.is_cuda and a.dtype != total.dtype):
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif _adds_to_float32(a.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))


@functools.cache
def _adds_to_float32(device: torch.device) -> bool:
    """Whether PyTorch adds a half-precision product to a float32 sum in place: 2.9 knows the product alone."""
    total, half = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, half, half, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True
