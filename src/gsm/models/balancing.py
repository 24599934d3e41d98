"""Loads of the experts of all layers: loss, metrics and counts for a model's output.

L layers with experts, E experts in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gsm.layers.experts import MixtureOfExperts
from gsm.layers.feed_forward import Balance


def report_balance(balances: Sequence[Balance]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return losses and metrics of the layers with experts, in order, for the output of a training forward.

    The loss is ``balance``, the sum over layers. The metric ``expert_load`` is the rows of the busiest expert divided
    by the mean: 1 when loads are even, E / K when all rows go to the same K experts. There is the mean over layers, and
    a value per layer, numbered from 1.
    """
    if not balances:
        return {}, {}
    sent_LE = torch.stack([balance.load_E for balance in balances])
    busiest_L = sent_LE.amax(-1) * sent_LE.shape[-1] / sent_LE.sum(-1).clamp(min=1)
    each = {f"expert_load/layer{layer}": load for layer, load in enumerate(busiest_L, 1)}
    loss = torch.stack([balance.loss for balance in balances]).sum()
    return {"balance": loss}, {**each, "expert_load": busiest_L.mean()}


def layers_with_experts(model: nn.Module) -> list[MixtureOfExperts]:
    """Return all mixtures of experts in execution order, encoder first."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
