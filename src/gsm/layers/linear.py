"""Bias-free linear maps with the project's initialisation: normal with variance 1 / fan-in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gsm.shapes import lowered
from gsm_kernels.device import in_dtype, once

# Gain of maps whose output is added to the residual streams. With a small gain, a new model learns faster at first.
INTO_RESIDUAL = 0.2

_moving = threading.Lock()


def draw(weight: Tensor, std: float) -> None:
    """Fill a weight from a normal distribution with standard deviation ``std``, except on the meta device.

    There PyTorch takes milliseconds per weight without any effect. Building a large model to count its parameters would
    take ten seconds instead of two.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Linear(nn.Linear):
    """A linear map without bias, ``x W^T``, used for every projection of the models.

    Args:
        dim_in, dim_out: widths of input and output.
        gain: scale of the initial weights; inputs of unit variance give outputs of variance ``gain ** 2``.
    """

    def __init__(self, dim_in: int, dim_out: int, *, gain: float = 1.0):
        self.gain = gain
        super().__init__(dim_in, dim_out, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        draw(self.weight, self.gain * self.in_features**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., dim_in] to [..., dim_out]. ``nn.Linear.forward`` also looks up a bias, which takes time in
        decoding."""
        return linear(input, self.weight)


class GroupedLinear(nn.Module):
    """Parallel linear maps: group g of the input channels is multiplied by matrix g.

    Args:
        groups: number of groups; must divide ``dim_in``.
        dim_in: width of the whole input.
        rank: width of the output of each group.
    """

    def __init__(self, groups: int, dim_in: int, rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, rank, dim_in // groups))
        draw(self.weight, (dim_in // groups) ** -0.5)

    def forward(self, x_BRD: Tensor) -> Tensor:
        """Map [..., dim_in] to [..., groups * rank]."""
        groups, rank, width = self.weight.shape
        split_NGI = lowered(x_BRD).reshape(-1, groups, width)
        weight_GOI = in_dtype(self.weight, split_NGI.dtype)
        if torch.compiler.is_compiling():  # PyTorch 2.13 compiles no product with an `out` of such strides
            mapped_NGO = torch.einsum("ngi,goi->ngo", split_NGI, weight_GOI)
        elif torch.is_grad_enabled():
            mapped_NGO = _GroupedProduct.apply(split_NGI, weight_GOI)
        else:
            mapped_NGO = _grouped_product(split_NGI, weight_GOI.mT)
        return mapped_NGO.reshape(*x_BRD.shape[:-1], groups * rank)


class _GroupedProduct(torch.autograd.Function):
    """``_grouped_product`` with the gradients of both arguments; the input's gradient is not transposed either."""

    @staticmethod
    def forward(ctx: Any, x_NGI: Tensor, weight_GOI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NGI, weight_GOI)
        return _grouped_product(x_NGI, weight_GOI.mT)

    @staticmethod
    @once
    def backward(ctx: Any, grad_NGO: Tensor) -> tuple[Tensor, Tensor]:
        x_NGI, weight_GOI = ctx.saved_tensors
        weight_grad_GOI = torch.bmm(grad_NGO.permute(1, 2, 0), x_NGI.transpose(0, 1))
        return _grouped_product(grad_NGO, weight_GOI), weight_grad_GOI


def _grouped_product(x_NGI: Tensor, weight_GIO: Tensor) -> Tensor:
    """Multiply group g of every row by matrix g. The products are written to their final place, without a transpose."""
    out_NGO = x_NGI.new_empty(*x_NGI.shape[:2], weight_GIO.shape[2])
    torch.bmm(x_NGI.transpose(0, 1), weight_GIO, out=out_NGO.transpose(0, 1))
    return out_NGO


def together(x: Tensor, *maps: Linear) -> tuple[Tensor, ...]:
    """Apply several maps to one input, [..., dim_in].

    For a single row without gradients and autocast, this is one product if the weights are ``side_by_side``. For more
    rows, the results would be strided pieces of the product, whose copies cost more than one product saves.
    """
    joint = _joint(x, maps)
    if joint is None:
        return tuple(part(x) for part in maps)
    return linear(x, joint).split([part.out_features for part in maps], dim=-1)


def concatenated(x: Tensor, *maps: Linear) -> Tensor:
    """Return the outputs of ``together`` as one tensor, [..., sum of dim_out]."""
    joint = _joint(x, maps)
    return torch.cat([part(x) for part in maps], dim=-1) if joint is None else linear(x, joint)


def side_by_side(model: nn.Module) -> None:
    """Move the weights of maps with the same input, which parts name by ``one_input()``, into one storage.

    Then one product can apply all of them (``together``). They remain separate parameters with the same names, values
    and gradients, and a change in place, such as an optimiser's, also changes the joint product. A cast or another
    assignment separates them again. Weights that are no ordinary parameters are not moved, nor are any weights of a
    model that FSDP2 divides.
    """
    parts = list(model.modules())
    if any(hasattr(part, "unshard") for part in parts):  # FSDP2 gathers weights into other memory before use
        return
    with _moving, torch.inference_mode(False), torch.no_grad():
        for part in parts:
            weights = [each.weight for each in getattr(part, "one_input", ())]
            if not weights or not all(map(_movable, weights)) or _adjacent(weights):
                continue
            if len({(weight.dtype, weight.device) for weight in weights}) == 1:
                pieces = torch.cat([weight.detach() for weight in weights]).split([len(weight) for weight in weights])
                for weight, piece in zip(weights, pieces, strict=True):
                    weight.data = piece


def _joint(x: Tensor, maps: Sequence[Linear]) -> Tensor | None:
    """Return the weights of the maps as one matrix, a view; None if the maps must be applied one by one."""
    if x.numel() != x.shape[-1] or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if any(type(part) is not Linear or part._forward_hooks or part._forward_pre_hooks for part in maps):
        return None  # a replacement of a map, such as LoRA's, may have the same weight and compute something else
    weights = [part.weight for part in maps]
    if not _adjacent(weights):
        return None
    if torch.is_autocast_enabled(x.device.type):  # autocast caches the lowered copy of a parameter, but not of a view
        return None
    width = weights[0].shape[1]
    return weights[0].as_strided((sum(map(len, weights)), width), (width, 1))


def _adjacent(weights: Sequence[Tensor]) -> bool:
    """Return whether weights lie one after another in one storage."""
    storage, place = weights[0].untyped_storage().data_ptr(), weights[0].storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == storage and weight.storage_offset() == place
        if not same or not weight.is_contiguous():
            return False
        place += weight.numel()
    return True


def _movable(weight: Tensor) -> bool:
    """Return whether a weight is an ordinary parameter, neither on the meta device nor made in inference mode."""
    return type(weight) is nn.Parameter and not weight.is_meta and not weight.is_inference()
