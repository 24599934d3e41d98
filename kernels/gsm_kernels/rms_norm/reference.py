"""Plain PyTorch RMSNorm with a hand-written backward: on a CPU PyTorch's own is six operations forward and a dozen
back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision, handed_out, in_dtype, once


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """See `gsm_kernels.rms_norm`."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        """The norm of x [..., D], in its dtype."""
        wide = at_least_float32(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # eps as a tensor, and 1 / D as a factor: of a number that is added or divided by PyTorch makes a tensor first.
        inverse = torch.add(wide.new_full((), eps), length.mul_(length), alpha=1 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return handed_out((wide * inverse).mul_(in_dtype(weight, wide.dtype)), x.dtype)

    @staticmethod
    @once
    def backward(ctx, grad):
        """Gradients of x and weight, each in the dtype of its input."""
        x, weight, inverse = ctx.saved_tensors
        with full_precision(grad):
            wide_ND, wide_D = at_least_float32(x).reshape(-1, x.shape[-1]), at_least_float32(weight)
            inverse_N1, grad_ND = inverse.view(-1, 1), grad.reshape(wide_ND.shape).to(wide_ND.dtype)
            product_ND = grad_ND * wide_ND
            weight_grad_D = inverse_N1.T @ product_ND
            # Along itself x has no gradient: the norm takes that part away.
            along_N1 = (product_ND @ wide_D[:, None]).mul_(inverse_N1.pow(3)).div_(-x.shape[-1])
            x_grad_ND = torch.addcmul(wide_ND * along_N1, grad_ND * wide_D, inverse_N1)
        return x_grad_ND.view(x.shape).to(x.dtype), weight_grad_D[0].to(weight.dtype), None
