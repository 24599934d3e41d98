"""RMSNorm in Triton: one kernel forward, and one backward with a small sum. Rows are held in registers and read once.

For N rows of D elements in bfloat16, the traffic is 4 D N bytes forward (x, y) and 6 D N backward (x and two
gradients), the minimum. Backward computes the inverse norm again, so that only the inputs are saved. For the gradient
of the weight, each of P programs sums its rows in float32, [P,D], and PyTorch sums over P: no atomics, the same bits in
every run. This adds 8 D P bytes, 4 % at N = 16,384.

`F.rms_norm` and Liger's kernel have the same minimum. But with a float32 weight and bfloat16 rows, as in mixed
precision, `F.rms_norm` is not fused (PyTorch warns of it), and Liger by default rounds the normalised row to bfloat16
before it multiplies by the weight. Here both steps are in float32, with one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, launch, unfit
from ..register import register
from ..rotate.triton import angles_of, tile

WIDEST = 8192  # largest D: 16 elements per thread in 16 warps; backward takes 118 of 128 registers per thread
PROGRAMS = 528  # programs of backward, four per multiprocessor, so that some load while others compute


def refuses(
    x: Tensor, weight: Tensor, eps: float = 1e-6, cos_BRP: Tensor | None = None, sin_BRP: Tensor | None = None
) -> str | None:
    """Return why the kernels cannot take this call, or None."""
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
