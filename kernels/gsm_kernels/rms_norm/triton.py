"""RMSNorm in one kernel forward and one, with a small sum, backward. Rows are held in registers: everything is read
once.

Bytes, for N rows of D numbers in bfloat16: 4 D N forward (x, y) and 6 D N backward (x, both gradients), which is the
floor; the inverse norm is computed again in backward from the row that is there anyway, so that nothing is kept but the
inputs. The weight's gradient is a sum over all rows: each of P programs adds up its own in float32, [P,D], and one sum
over P follows, with no atomics and the same bits every time. It adds 8 D P bytes: 4 % at N = 16,384.

PyTorch's own `F.rms_norm` and Liger's kernel wait for the same bytes. But with a float32 weight and bfloat16 rows, as
in mixed-precision training, PyTorch's is not fused (it warns of that), and Liger's default rounds the normed row to
bfloat16 before the weight scales it. Here both happen in float32, with one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, launch, unfit
from ..register import register
from ..rotate.triton import angles_of, tile

WIDEST = 8192  # 16 numbers a thread in 16 warps: backward takes 118 of the 128 registers that each of them may have
PROGRAMS = 528  # four for each of 132 processors, so that loads of some hide the sums of others


def refuses(
    x: Tensor, weight: Tensor, eps: float = 1e-6, cos_BRP: Tensor | None = None, sin_BRP: Tensor | None = None
) -> str | None:
    """Return why this call is not for the kernels."""
    if not 0 < x.shape[-1] <= WIDEST:
        return f"holds a row in registers, at most {WIDEST} numbers and at least one, got {x.shape[-1]}"
    return unfit(*(tensor for tensor in (x, weight, cos_BRP, sin_BRP) if tensor is not None))


def _forward(
    x: Tensor, weight: Tensor, eps: float = 1e-6, cos_BRP: Tensor | None = None, sin_BRP: Tensor | None = None
) -> Tensor:
    from .kernels import forward

    x, weight, (rows, sizes) = x.contiguous(), weight.contiguous(), tile(x.shape[-1])
    cos, sin, turn = angles_of(x, cos_BRP, sin_BRP)
    out, count = torch.empty_like(x), x.shape[:-1].numel()
    launch(forward, (cdiv(count, rows),), x, weight, cos, sin, out, eps, count, **turn, **sizes)
    return out


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, cos_BRP: Tensor | None, sin_BRP: Tensor | None
) -> tuple[Tensor, Tensor]:
    from .kernels import backward

    grad, x, weight, (rows, sizes) = grad.contiguous(), x.contiguous(), weight.contiguous(), tile(x.shape[-1])
    cos, sin, turn = angles_of(x, cos_BRP, sin_BRP)
    count = x.shape[:-1].numel()
    programs = min(PROGRAMS, cdiv(count, rows))
    x_grad = torch.empty_like(x)
    partial_PD = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    tensors = (grad, x, weight, cos, sin, x_grad, partial_PD)
    launch(backward, (programs,), *tensors, eps, count, **turn, **sizes)
    return x_grad, partial_PD.sum(0).to(weight.dtype)


rms_norm = register("rms_norm", _forward, backward=_backward, learned=("x", "weight"))
