"""The clamped SwiGLU product on a CPU, by compiled loops. Only the inputs are saved for backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import in_dtype
from ..dispatch import Impl
from ..register import register
from ..swiglu import swiglu as operation
from .native import loops, missing, run, unfit, wide

LEAST = 1 << 13  # elements per thread, at least


def _forward(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    gates = wide(gate)
    out = torch.empty_like(gates)
    run(loops("swiglu").forward, out.numel(), limit, gates, wide(up), out, least=LEAST)
    return in_dtype(out, gate.dtype)


def _backward(grad: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    inputs = [wide(x) for x in (grad, gate, up)]
    gate_grad, up_grad = torch.empty_like(inputs[1]), torch.empty_like(inputs[2])
    run(loops("swiglu").backward, gate_grad.numel(), limit, *inputs, gate_grad, up_grad, least=LEAST)
    return in_dtype(gate_grad, gate.dtype), in_dtype(up_grad, up.dtype)


swiglu = register("swiglu", _forward, backward=_backward, learned=("gate", "up"), on_cpu=True)

operation.add(Impl("numba", swiglu, unfit, missing))
