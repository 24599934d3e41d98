"""Plain PyTorch hyper-connections with a hand-written backward. Letters: N tokens (B*R folded), X streams, D width.

Coefficients are kept with the tokens last ([X,N], [X,X,N]): forty normalisations of X x X matrices are then forty vector
operations. Backward keeps the numbers r of forward (2X + X*X per token) and runs Sinkhorn again from them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import at_least_float32, full_precision
from .sinkhorn import sinkhorn, sinkhorn_grad


def mhc_enter(streams_BTXD: Tensor, read_BTX: Tensor) -> Tensor:
    """See `gsm_kernels.mhc`."""
    return _Enter.apply(streams_BTXD, read_BTX)


def mhc_leave(
    streams_BRXD: Tensor,
    update_BRD: Tensor,
    phi: Tensor,
    bias: Tensor,
    scale: Tensor,
    rounds: int = 20,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """See `gsm_kernels.mhc`."""
    return _Leave.apply(streams_BRXD, update_BRD, phi, bias, scale, rounds, eps, hc_eps)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams_BTXD, read_BTX):
        ctx.save_for_backward(streams_BTXD, read_BTX)
        streams, read = _folded(streams_BTXD, 2), _folded(read_BTX, 1)
        mixed = torch.bmm(read[:, None].to(streams.dtype), streams)
        return mixed.to(streams_BTXD.dtype).view(*streams_BTXD.shape[:2], -1)

    @staticmethod
    def backward(ctx, grad_BTD):
        streams_BTXD, read_BTX = ctx.saved_tensors
        with full_precision(grad_BTD):
            streams, read = _folded(streams_BTXD, 2), _folded(read_BTX, 1)
            grad = _folded(grad_BTD, 1)
            streams_grad = read[:, :, None].to(streams.dtype) * grad[:, None]
            read_grad = torch.bmm(streams, grad[:, :, None])
        streams_grad = streams_grad.to(streams_BTXD.dtype).view(streams_BTXD.shape)
        return streams_grad, read_grad.to(read_BTX.dtype).view(read_BTX.shape)


class _Coefficients(NamedTuple):
    """What a token's streams decide: read A [X,N], write C [X,N], and the stages of the mixing M [X,X,N]."""

    read_XN: Tensor
    half_write_XN: Tensor
    stages: list[Tensor]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams_BRXD, update_BRD, phi, bias, scale, rounds, eps, hc_eps):
        streams, update = _folded(streams_BRXD, 2), _folded(update_BRD, 1)
        flat_ND = streams.flatten(1)
        inverse_N = (flat_ND.square().mean(1) + eps).rsqrt_()
        number_cN = (flat_ND @ phi.to(flat_ND.dtype).T).T.contiguous().mul_(inverse_N)
        ctx.save_for_backward(streams_BRXD, update_BRD, phi, bias, scale, inverse_N, number_cN)
        ctx.rounds, ctx.hc_eps = rounds, hc_eps
        read_XN, half_write_XN, stages = _coefficients(number_cN, bias, scale, streams.shape[1], rounds, hc_eps)
        mixed = torch.bmm(stages[-1].permute(2, 1, 0).contiguous(), streams)
        mixed.addcmul_(half_write_XN.T[:, :, None], update[:, None], value=2)
        read_BRX = (read_XN + hc_eps).T.contiguous().view(streams_BRXD.shape[:3])
        return mixed.to(streams_BRXD.dtype).view(streams_BRXD.shape), read_BRX

    @staticmethod
    def backward(ctx, mixed_grad_BRXD, read_grad_BRX):
        saved = ctx.saved_tensors
        with full_precision(mixed_grad_BRXD):
            grads = _leave_gradients(saved, ctx.rounds, ctx.hc_eps, mixed_grad_BRXD, read_grad_BRX)
        return *(grad.to(x.dtype).view(x.shape) for grad, x in zip(grads, saved, strict=False)), None, None, None


def _folded(x: Tensor, kept: int) -> Tensor:
    """Batch and rows folded into N, `kept` dimensions left, contiguous, in at least float32."""
    return at_least_float32(x).contiguous().view(-1, *x.shape[-kept:])


def _coefficients(number_cN: Tensor, bias: Tensor, scale: Tensor, streams: int, rounds: int, eps: float) -> _Coefficients:
    scale_c = _per_number(scale.to(number_cN.dtype), streams)
    logit_cN = torch.addcmul(bias.to(number_cN.dtype)[:, None], number_cN, scale_c[:, None])
    gates = torch.sigmoid(logit_cN[: 2 * streams])
    stages = sinkhorn(logit_cN[2 * streams :].view(streams, streams, -1), rounds, eps)
    return _Coefficients(gates[:streams], gates[streams:], stages)


def _per_number(scale: Tensor, streams: int) -> Tensor:
    """The three scales, each repeated for the numbers it multiplies."""
    read, write, mix = scale.unbind()
    return torch.cat((read.expand(streams), write.expand(streams), mix.expand(streams * streams)))


def _leave_gradients(saved, rounds: int, hc_eps: float, mixed_grad_BRXD: Tensor, read_grad_BRX: Tensor) -> tuple[Tensor, ...]:
    streams_BRXD, update_BRD, phi, bias, scale, inverse_N, number_cN = saved
    streams, update, grad = _folded(streams_BRXD, 2), _folded(update_BRD, 1), _folded(mixed_grad_BRXD, 2)
    count = streams.shape[1]
    made = _coefficients(number_cN, bias, scale, count, rounds, hc_eps)
    mix_NXX = made.stages[-1].permute(2, 0, 1).contiguous()
    update_grad = torch.bmm(made.half_write_XN.T[:, None].contiguous(), grad)[:, 0].mul_(2)
    write_grad_XN = torch.bmm(grad, update[:, :, None])[..., 0].T * 2
    mix_grad = torch.bmm(streams, grad.mT).permute(1, 2, 0).contiguous()
    logit_grad_cN = torch.cat(
        (
            _sigmoid_grad(made.read_XN, _folded(read_grad_BRX, 1).T.to(grad.dtype)),
            _sigmoid_grad(made.half_write_XN, write_grad_XN),
            sinkhorn_grad(mix_grad, made.stages, rounds, hc_eps).flatten(0, 1),
        )
    )
    by_number = (logit_grad_cN * number_cN).sum(1)
    scale_grad = torch.stack([part.sum() for part in by_number.split((count, count, count * count))])
    number_grad = logit_grad_cN * _per_number(scale.to(grad.dtype), count)[:, None]
    from_norm_N = (number_grad * number_cN).sum(0) * inverse_N.square() / -phi.shape[1]
    number_grad *= inverse_N
    streams_grad = (streams * from_norm_N[:, None, None]).flatten(1).addmm_(number_grad.T, phi.to(grad.dtype))
    streams_grad.view(streams.shape).baddbmm_(mix_NXX, grad)
    return streams_grad, update_grad, number_grad @ streams.flatten(1), logit_grad_cN.sum(1), scale_grad


def _sigmoid_grad(value: Tensor, grad: Tensor) -> Tensor:
    return grad * value * (1 - value)
