"""The load balance of the experts in all layers: the loss and the metrics of a training forward.

L layers with experts, E experts in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gsm.layers.experts import MixtureOfExperts
from gsm.layers.feed_forward import Balance


def report_balance(balances: Sequence[Balance]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses and the metrics, by name, of the layers with experts; both are empty without such layers.

    The loss ``balance`` is the sum over layers. The metric ``expert_load/layer<n>`` is the number of rows of the
    busiest expert in layer n divided by the mean over experts: 1 when loads are even, E / K when all rows go to the
    same K experts. ``expert_load`` is its mean over layers.

    Args:
        balances: the loads of each layer with experts, in order; layers are numbered from 1 in this order.
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
