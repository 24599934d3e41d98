"""Plain PyTorch hyper-connections with a hand-written backward.

Letters: N tokens (B*R), X streams, D width, c all numbers of a token (2X + X*X), g those of reading and writing (2X).

Tokens are the last dimension of coefficients ([X,N], [X,X,N]), so that the forty normalisations of X x X matrices are
forty vector operations. Forward saves the numbers r, the mixing matrices and their divisors for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision, handed_out, once
from .inputs import Inputs
from .sinkhorn import sinkhorn, sinkhorn_grad


def mhc_boundary(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.mhc`."""
    return _Boundary.apply(*inputs)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams_BRXD, update_BRD, phi, bias, scale, rounds, eps, hc_eps):
        """Return the new streams [B,R,X,D] and the next site's input [B,R,D], both in the dtype of the streams."""
        streams, update = _folded(streams_BRXD, 2), _folded(update_BRD, 1)
        flat_ND, count = streams.flatten(1), streams.shape[1]
        inverse_N = torch.linalg.vector_norm(flat_ND, dim=1).square_().div_(flat_ND.shape[1]).add_(eps).rsqrt_()
        number_cN = (flat_ND @ phi.to(flat_ND.dtype).T).T.contiguous().mul_(inverse_N)
        scale_c = _per_number(scale.to(number_cN.dtype), count)
        logit_cN = torch.addcmul(bias.to(number_cN.dtype)[:, None], number_cN, scale_c[:, None])
        gate_gN = torch.sigmoid(logit_cN[: 2 * count])
        mix_XXN, divisors = sinkhorn(logit_cN[2 * count :].view(count, count, -1), rounds, hc_eps)
        left = (gate_gN[count:].T * 2).contiguous()[:, :, None] * update[:, None]
        left.baddbmm_(mix_XXN.permute(2, 1, 0).contiguous(), streams)
        mixed = torch.bmm((gate_gN[:count] + hc_eps).T[:, None].contiguous(), left)
        left = handed_out(left.view(streams_BRXD.shape), streams_BRXD.dtype)
        coefficients = (inverse_N, number_cN, gate_gN, mix_XXN, *divisors)
        ctx.save_for_backward(streams_BRXD, update_BRD, phi, bias, scale, left, *coefficients)
        ctx.hc_eps = hc_eps
        return left, handed_out(mixed.view(update_BRD.shape), streams_BRXD.dtype)

    @staticmethod
    @once
    def backward(ctx, left_grad_BRXD, mixed_grad_BRD):
        """Return the gradients of streams, update, phi, bias and scale, each in the dtype of its input."""
        saved = ctx.saved_tensors
        with full_precision(left_grad_BRXD):
            grads = _gradients(saved, ctx.hc_eps, left_grad_BRXD, mixed_grad_BRD)
        return *(grad.to(x.dtype).view(x.shape) for grad, x in zip(grads, saved, strict=False)), None, None, None


def _folded(x: Tensor, kept: int) -> Tensor:
    """Return `x` [B,R,...] as [N,...] with `kept` further dimensions, contiguous, in float32 or float64."""
    return at_least_float32(x).contiguous().view(-1, *x.shape[-kept:])


def _per_number(scale: Tensor, streams: int) -> Tensor:
    """Return the three scales, each repeated for the numbers that it multiplies, [c]."""
    read, write, mix = scale.unbind()
    return torch.cat((read.expand(streams), write.expand(streams), mix.expand(streams * streams)))


def _gradients(
    saved: tuple[Tensor, ...], hc_eps: float, left_grad_BRXD: Tensor, mixed_grad_BRD: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of streams, update, phi, bias and scale."""
    streams_BRXD, update_BRD, phi, _, scale, left_BRXD, inverse_N, number_cN, gate_gN, mix_XXN, *divisors = saved
    streams, update, mixed_grad = _folded(streams_BRXD, 2), _folded(update_BRD, 1), _folded(mixed_grad_BRD, 1)
    count = streams.shape[1]
    read_grad_XN = torch.bmm(mixed_grad[:, None], _folded(left_BRXD, 2).mT)[:, 0].T
    # The whole gradient of the new streams: from their later uses, and through the next site's input.
    read_NX = (gate_gN[:count] + hc_eps).T.contiguous()
    grad = torch.addcmul(_folded(left_grad_BRXD, 2), read_NX[:, :, None], mixed_grad[:, None])
    write_grad_XN = torch.bmm(update[:, None], grad.mT)[:, 0].T * 2
    gate_grad_gN = torch.cat((read_grad_XN, write_grad_XN)) * gate_gN * (1 - gate_gN)
    mix_grad_XXN = torch.bmm(streams, grad.mT).permute(1, 2, 0).contiguous()
    mix_grad_cN = sinkhorn_grad(mix_grad_XXN, mix_XXN, divisors, hc_eps).flatten(0, 1)
    logit_grad_cN = torch.cat((gate_grad_gN, mix_grad_cN))
    by_number = (logit_grad_cN * number_cN).sum(1)
    scale_grad = torch.stack([part.sum() for part in by_number.split((count, count, count * count))])
    number_grad_cN = logit_grad_cN * _per_number(scale.to(grad.dtype), count)[:, None]
    # number = phi . x / rms(x), so the gradient of x has a part along the rows of phi, and one along x through the rms.
    along_N = (number_grad_cN * number_cN).sum(0) * inverse_N.square() / -phi.shape[1]
    number_grad_cN *= inverse_N
    streams_grad = (streams * along_N[:, None, None]).flatten(1).addmm_(number_grad_cN.T, phi.to(grad.dtype))
    streams_grad.view(streams.shape).baddbmm_(mix_XXN.permute(2, 0, 1).contiguous(), grad)
    update_grad = torch.bmm(gate_gN[count:].T[:, None].contiguous(), grad).mul_(2)
    return streams_grad, update_grad, number_grad_cN @ streams.flatten(1), logit_grad_cN.sum(1), scale_grad
