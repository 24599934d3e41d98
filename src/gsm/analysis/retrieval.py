"""How far back layers and stages look, and what they leave to sinks; what stages share with the encoder by length is
``gsm.evaluation.overlap``.

B sequences, T positions, R rows, H heads, E weights of a row, K selected slots, D distances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.models.gsm import GSM
from gsm.observe import Seen
from gsm.shapes import last


def names_of(model: GSM) -> list[str]:
    """All attentions in the order of the computation: ``encoder/1`` .., ``stage/1`` .., ``decoder/5`` .."""
    geometry, stages = model.geometry, len(model.aggregation.layers)
    encoder = [f"encoder/{layer}" for layer in range(1, geometry.encoder_layers + 1)]
    decoder = [f"decoder/{layer}" for layer in range(geometry.encoder_layers + 1, geometry.depth + 1)]
    return [*encoder, *(f"stage/{stage}" for stage in range(1, stages + 1)), *decoder]


def sinks(model: GSM, seen: Seen) -> dict[str, Tensor]:
    """How much every head of every attention leaves to its sink, by name, float [H]: the mean over rows, without
    padding. Of a recorded call (``position``, ``*/weights``)."""
    found = {}
    for name in names_of(model):
        weight_BRHE = seen[f"{name}/weights"]
        counted_BR = last(seen["position"], weight_BRHE.shape[1]) >= 0
        found[name] = weight_BRHE[counted_BR][..., -1].mean(dim=0)
    return found


def by_distance(model: GSM, seen: Seen, name: str, edges: Tensor) -> Tensor:
    """How much weight falls on entries that begin so many tokens before their row, float [D]: a mean over rows and
    heads; what it lacks to 1 goes to the sink.

    Args:
        model: the model that was recorded.
        seen: one call without a memory, on one document a sequence (``position``, ``<name>/weights``,
            ``<name>/top_k``).
        name: ``encoder/<l>``, ``stage/<s>`` or ``decoder/<l>``.
        edges: int64 [D], ascending from 0: distance d belongs to the last edge that is not above it.
    """
    weight_BRE, chosen_BRK = seen[f"{name}/weights"].mean(dim=2), seen.get(f"{name}/top_k")
    slots = 0 if chosen_BRK is None else chosen_BRK.shape[2]
    each = model.writer.slots if name.startswith("decoder/") else 1  # entries of a position
    position_BR1 = last(seen["position"], weight_BRE.shape[1])[..., None]
    back_W = torch.arange(weight_BRE.shape[2] - slots - 2, -1, -1, device=weight_BRE.device) // each
    distance_BRE = back_W.expand(*weight_BRE.shape[:2], -1)
    if chosen_BRK is not None:
        far_BRK = position_BR1 - chosen_BRK * model.geometry.encoder_ratio
        distance_BRE = torch.cat([distance_BRE, far_BRK], dim=2)
    counted_BRE = (position_BR1 >= 0).expand_as(distance_BRE)
    bucket_N = torch.bucketize(distance_BRE[counted_BRE], edges, right=True) - 1
    total_D = weight_BRE.new_zeros(len(edges)).scatter_add_(0, bucket_N.clamp(min=0), weight_BRE[..., :-1][counted_BRE])
    return total_D / (position_BR1 >= 0).sum()
