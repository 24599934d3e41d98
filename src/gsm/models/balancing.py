"""The experts of all layers together: what a model says of their loads.

L layers with experts, E experts in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gsm.cache.pieces import Pieces
from gsm.exchange import summed
from gsm.layers.experts import MixtureOfExperts
from gsm.layers.feed_forward import Balance


class BalanceReport(NamedTuple):
    """What a forward in training adds to its output for its experts.

    Attributes:
        losses: ``balance``, the sum over layers.
        metrics: ``expert_load``, the rows of the busiest expert over the mean: 1 when all is even, E / K when all rows
            go to the same K; the mean over layers, and each layer's own, counted from 1 over the depth.
        load_LE: int64, rows of this rank sent to each expert (None: there are no experts, or this is not training).
    """

    losses: dict[str, Tensor]
    metrics: dict[str, Tensor]
    load_LE: Tensor | None


def report_balance(balances: Sequence[Balance], pieces: Pieces | None = None) -> BalanceReport:
    """Sums up what the layers with experts say, in their order; of sequences in pieces, what all of their ranks say."""
    if not balances:
        return BalanceReport({}, {}, None)
    whole = balances if pieces is None else of_whole_sequences(balances, pieces)
    sent_LE = torch.stack([balance.load_E for balance in whole])
    busiest_L = sent_LE.amax(-1) * sent_LE.shape[-1] / sent_LE.sum(-1).clamp(min=1)
    each = {f"expert_load/layer{layer}": load for layer, load in enumerate(busiest_L, 1)}
    loss = torch.stack([balance.loss for balance in whole]).sum()
    load_LE = torch.stack([balance.load_E for balance in balances])
    return BalanceReport({"balance": loss}, {**each, "expert_load": busiest_L.mean()}, load_LE)


def of_whole_sequences(balances: Sequence[Balance], pieces: Pieces) -> list[Balance]:
    """Where the rows of whole sequences were sent. The scores stay those of the rows here, times the ranks: so the mean
    of the ranks' losses is that of whole sequences, and each rank has the gradient of its own rows."""
    counted_LYU = torch.stack([torch.cat([one.sent_BE, one.rows_B[:, None]], dim=-1) for one in balances])
    counted_LBU = summed(counted_LYU.unflatten(1, (pieces.each, -1)).sum(1), pieces.context.group)
    found = []
    for one, counted_BU in zip(balances, counted_LBU, strict=True):
        share_BE = one.share_BE.unflatten(0, (pieces.each, -1)).sum(0) * pieces.context.size
        found.append(one._replace(sent_BE=counted_BU[:, :-1], share_BE=share_BE, rows_B=counted_BU[:, -1]))
    return found


def layers_with_experts(model: nn.Module) -> list[MixtureOfExperts]:
    """In the order in which the layers run, encoder first."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
