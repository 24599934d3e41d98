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

from ..launch import cdiv, launch, power_of_two, unfit
from ..register import register

WIDEST = 8192  # 16 numbers a thread in 16 warps: backward takes 118 of the 128 registers that each of them may have
PROGRAMS = 528  # four for each of 132 processors, so that loads of some hide the sums of others


def refuses(x: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    """Return why this call is not for the kernels."""
    if not 0 < x.shape[-1] <= WIDEST:
        return f"holds a row in registers, at most {WIDEST} numbers and at least one, got {x.shape[-1]}"
    return unfit(x, weight)


def tile(width: int) -> tuple[int, int, int]:
    """Rows of a tile, its columns, and warps: 16 numbers a thread, in narrow rows several of them at a time."""
    columns = power_of_two(width)
    rows = max(1, 2048 // columns)
    return rows, columns, min(16, rows * columns // 512)


def _forward(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    from .kernels import forward

    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    (rows, columns, warps), width = tile(x.shape[-1]), x.shape[-1]
    count = x.numel() // width
    sizes = {"D": width, "ROWS": rows, "BLOCK": columns, "num_warps": warps}
    launch(forward, (cdiv(count, rows),), x, weight, out, eps, count, **sizes)
    return out


def _backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from .kernels import backward

    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    (rows, columns, warps), width = tile(x.shape[-1]), x.shape[-1]
    count = x.numel() // width
    programs = min(PROGRAMS, cdiv(count, rows))
    x_grad = torch.empty_like(x)
    partial_PD = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    sizes = {"D": width, "ROWS": rows, "BLOCK": columns, "num_warps": warps}
    launch(backward, (programs,), grad, x, weight, x_grad, partial_PD, eps, count, **sizes)
    return x_grad, partial_PD.sum(0).to(weight.dtype)


rms_norm = register("rms_norm", _forward, backward=_backward, learned=("x", "weight"))
