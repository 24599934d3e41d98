"""Where attention goes, from recorded attention weights: over the positions of a text and the entries of the state, by
distance, and to the sinks. ``gsm.analysis.overlap`` compares the selections of stages and encoder.

A recording ``seen`` is the result of ``with gsm.record(...) as seen``: tensors by the name of their tap.

B sequences, T positions, R rows, H heads, W window entries, K selected slots, E weights of a row, L layers, N entries
of all rows, D distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gsm.cache.slots import plan_slots
from gsm.layers.key_value import RangeAttention
from gsm.layers.latent_attention import LatentAttention
from gsm.layers.nsa import NSA
from gsm.layers.sparse import SparseAttention
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM, check_gsm
from gsm.observe import Recording
from gsm.shapes import last_rows
from gsm.slots.state_reader.base import StateAttention


def attention_map(
    model: LanguageModel, seen: Recording, name: str, sequence: int = 0, head: int | None = None
) -> Tensor:
    """Return the attention weight of every row on every position of a sequence, float [R, T].

    The weight of a bank entry is divided evenly among its tokens, and the weights of all state entries of one position
    are added. Each row sums to at most 1; the rest is the sink's weight. Arguments and errors are those of
    ``attention_parts``.
    """
    near_RT, far_RT = attention_parts(model, seen, name, sequence, head)
    return near_RT + far_RT


def attention_parts(
    model: LanguageModel, seen: Recording, name: str, sequence: int = 0, head: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention weights of ``attention_map`` in two maps [R, T]: on single tokens (in GSM's decoder, on the
    state's entries), and on the bank.

    Args:
        model: the recorded model.
        seen: a recording of one call without a memory, on documents from their beginnings (``position``,
            ``<name>/weights``, and ``<name>/top_k`` if a bank is read).
        name: ``encoder/<l>``, ``stage/<s>`` or ``decoder/<l>``; for NSA ``decoder/<l>/selected`` and so on.
        sequence: index of the sequence in the batch.
        head: index of the head; None: the mean over heads.

    Raises:
        KeyError: if the weights were not recorded; the message lists the recorded taps.
        ValueError: if there is no such head, or no attention with this name.
    """
    weight_RHE, length = seen[f"{name}/weights"][sequence], seen["position"].shape[1]
    if head is not None and not 0 <= head < weight_RHE.shape[1]:
        raise ValueError(f"head of {name} must be in [0, {weight_RHE.shape[1] - 1}], got {head}")
    weight_RE = weight_RHE.mean(dim=1) if head is None else weight_RHE[:, head]
    rows, chosen_BRK = weight_RE.shape[0], seen.get(f"{name}/top_k")
    near_RT, far_RT = weight_RE.new_zeros(2, rows, length)
    part = attention_of(model, name)
    if isinstance(part, RangeAttention):  # no sink; a weight for each token, or in NSA for each compressed block
        if isinstance(part, NSA) and name.endswith("/compressed"):
            block_RF = torch.arange(weight_RE.shape[1], device=weight_RE.device).expand(rows, -1)
            return near_RT, _spread(far_RT, weight_RE, block_RF, part.block, seen["position"][sequence])
        return pad(weight_RE, (length - weight_RE.shape[1], 0)), far_RT
    window = weight_RE.shape[1] - 1 - (0 if chosen_BRK is None else chosen_BRK.shape[2])
    row_R1 = torch.arange(length - rows, length, device=weight_RE.device)[:, None]
    position_RW = row_R1 - entries_back(model, name, window).to(weight_RE.device)
    near_RT.scatter_add_(1, position_RW.clamp(min=0), weight_RE[:, :window] * (position_RW >= 0))
    if chosen_BRK is not None:
        ratio = part.ratio if isinstance(part, SparseAttention) else cast(GSM, model).geometry.encoder_ratio
        _spread(far_RT, weight_RE[:, window:-1], chosen_BRK[sequence], ratio, seen["position"][sequence])
    return near_RT, far_RT


def _spread(map_RT: Tensor, weight_RK: Tensor, slot_RK: Tensor, ratio: int, position_T: Tensor) -> Tensor:
    """Add the weight of each slot to its tokens, in equal shares; -1 is no slot."""
    start_F = _starts(position_T[None], ratio)[0]
    if not len(start_F):
        return map_RT
    start_RK = start_F[slot_RK.clamp(min=0)]
    share_RK = weight_RK * ((slot_RK >= 0) & (start_RK >= 0)) / ratio
    for offset in range(ratio):
        map_RT.scatter_add_(1, start_RK.clamp(min=0) + offset, share_RK)
    return map_RT


def attention_of(model: LanguageModel, name: str) -> nn.Module:
    """Return the attention module whose taps begin with ``name``.

    Raises:
        ValueError: if there is none; the message lists the names of all.
    """
    parts = {part.name: part for part in model.modules() if isinstance(part, (LatentAttention, RangeAttention))}
    found = parts.get(name) or parts.get(name.rpartition("/")[0])
    if found is None:
        raise ValueError(f"name must be that of an attention ({', '.join(parts) or 'there is none'}), got {name!r}")
    return found


def slot_starts(model: GSM, position_BT: Tensor) -> Tensor:
    """Return the index in the sequence of the first token of each slot of a bank, int64 [B, F]; negative for unused
    slots. A slot holds ``encoder_ratio`` consecutive tokens.

    Args:
        model: any GSM.
        position_BT: int64, the tap ``position`` of a call without a memory.
    """
    return _starts(position_BT, model.geometry.encoder_ratio)


def _starts(position_BT: Tensor, ratio: int) -> Tensor:
    return plan_slots(position_BT, ratio, None).end_BG - (ratio - 1)


def entries_back(model: LanguageModel, name: str, entries: int) -> Tensor:
    """Return how many positions before the row each entry of its window, or of the state, was written, int64 [W].

    In a GSM decoder layer, the state's entries come first, then those of the layer's window, if it has one.

    Args:
        model: any model.
        name: name of the attention, as in ``attention_parts``.
        entries: number of these entries (W).
    """
    part = attention_of(model, name)
    own, each = own_entries(model, name), part.slots if isinstance(part, StateAttention) else 1
    return torch.cat([torch.arange(entries - own - 1, -1, -1) // each, torch.arange(own - 1, -1, -1)])


def written(words: Sequence[str], back_W: Tensor) -> list[str]:
    """Return the token at which each entry was written; empty for places of a window before the first token.

    Args:
        words: the tokens up to the row as text.
        back_W: distances of ``entries_back``.
    """
    return [words[-1 - back] if back < len(words) else "" for back in map(int, back_W)]


def own_entries(model: LanguageModel, name: str) -> int:
    """Return the number of entries of a GSM decoder layer's window, which follow those of the state; 0 for other
    attentions."""
    part = attention_of(model, name)
    return part.own_size if isinstance(part, StateAttention) else 0


def decoder_layers(model: GSM) -> range:
    """Return the numbers of the decoder layers, which follow those of the encoder layers. Raises ValueError for another
    model."""
    check_gsm(model)
    return range(model.geometry.encoder_layers + 1, model.geometry.depth + 1)


def decoder_attention(model: GSM, seen: Recording) -> Tensor:
    """Return the mean over heads of ``decoder_heads``, [L, E]."""
    return decoder_heads(model, seen).mean(dim=1)


def decoder_heads(model: GSM, seen: Recording, row: int | None = None) -> Tensor:
    """Return the attention weights of each decoder layer and head on the state, float32 [L, H, E]; the last column is
    the sink. A layer that reads fewer entries than others has NaN for the older ones.

    Args:
        model: the recorded model.
        seen: a recording of one call without a memory (``position``, ``decoder/*/weights``).
        row: index of a row of the first sequence, may be negative; None: the mean over all rows that see a full state,
            or if there is none, over all rows except padding.
    """
    means = []
    for layer in decoder_layers(model):
        weight_BRHE = seen[f"decoder/{layer}/weights"]
        if row is not None:
            means.append(weight_BRHE[0, row if row < 0 else row - seen["position"].shape[1]].float())
            continue
        position_BR = last_rows(seen["position"], weight_BRHE.shape[1])
        whole_BR = position_BR >= model.writer.positions - 1
        means.append(weight_BRHE[whole_BR if whole_BR.any() else position_BR >= 0].float().mean(dim=0))
    longest = max(mean_HE.shape[1] for mean_HE in means)
    return torch.stack([pad(mean_HE, (longest - mean_HE.shape[1], 0), value=torch.nan) for mean_HE in means])


def names_of(model: GSM) -> list[str]:
    """Return the names of all attentions in the order of computation: ``encoder/1``, ..., ``stage/1``, ...,
    ``decoder/5``, ..."""
    recurrent = with_recurrences(model)
    encoder = [f"encoder/{layer}" for layer, _ in enumerate(model.encoder, 1) if layer not in recurrent]
    stages = [f"stage/{stage}" for stage, _ in enumerate(model.aggregation, 1)]
    return [*encoder, *stages, *(f"decoder/{layer}" for layer in decoder_layers(model))]


def with_recurrences(model: GSM) -> list[int]:
    """Return the numbers of the encoder layers with a recurrence or another mixer instead of sparse attention
    (``model/encoder_layer``). Raises ValueError for another model."""
    check_gsm(model)
    layers = enumerate(model.encoder, 1)
    return [layer for layer, block in layers if not isinstance(block.attention, LatentAttention)]


def sinks(model: GSM, seen: Recording, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the mean weight of the sink of every head, [H], by the name of the attention.

    Args:
        model: the recorded model.
        seen: a recording of one call (``position``, ``*/weights``). Padding is left out.
        names: of attentions; empty: all of ``names_of``.
    """
    sinks = {}
    for name in names or names_of(model):
        weight_BRHE = seen[f"{name}/weights"]
        counted_BR = last_rows(seen["position"], weight_BRHE.shape[1]) >= 0
        sinks[name] = weight_BRHE[counted_BR][..., -1].mean(dim=0)
    return sinks


def by_distance(model: GSM, seen: Recording, name: str, edges: Tensor) -> Tensor:
    """Return the attention weight by distance in tokens from the row, float [D]: the mean over rows and heads. It sums
    to less than 1; the rest is the sink's weight.

    Args:
        model: the recorded model.
        seen: a recording of one call without a memory, with one document per sequence (``position``,
            ``<name>/weights``, ``<name>/top_k``).
        name: ``encoder/<l>``, ``stage/<s>`` or ``decoder/<l>``.
        edges: int64 [D], lower bounds of the distances, ascending from 0; the last bin has no upper bound.
    """
    weight_BRE, chosen_BRK = seen[f"{name}/weights"].mean(dim=2), seen.get(f"{name}/top_k")
    slots = 0 if chosen_BRK is None else chosen_BRK.shape[2]
    position_BR1 = last_rows(seen["position"], weight_BRE.shape[1])[..., None]
    back_W = entries_back(model, name, weight_BRE.shape[2] - slots - 1).to(weight_BRE.device)
    distance_BRE = back_W.expand(*weight_BRE.shape[:2], -1)
    if chosen_BRK is not None:
        far_BRK = position_BR1 - chosen_BRK * model.geometry.encoder_ratio
        distance_BRE = torch.cat([distance_BRE, far_BRK], dim=2)
    counted_BRE = (position_BR1 >= 0).expand_as(distance_BRE)
    bucket_N = torch.bucketize(distance_BRE[counted_BRE], edges, right=True) - 1
    total_D = weight_BRE.new_zeros(len(edges)).scatter_add_(0, bucket_N.clamp(min=0), weight_BRE[..., :-1][counted_BRE])
    return total_D / (position_BR1 >= 0).sum()


def selections(model: GSM, seen: Recording) -> dict[int, Tensor]:
    """Return, by stage, how many tokens before its row each selected entry begins, int64 [B, R, K]; -1 for none.

    Args:
        model: the recorded model.
        seen: a recording of one call without a memory (``position``, ``stage/<s>/top_k``).
    """
    ratio, distances = model.geometry.encoder_ratio, {}
    for stage in range(1, len(model.aggregation.layers) + 1):
        chosen_BRK = seen.get(f"stage/{stage}/top_k")
        if chosen_BRK is None:
            continue
        rows, position_BT = chosen_BRK.shape[1], seen["position"]
        first_BR = last_rows(plan_slots(position_BT, ratio, None).first_BT, rows)
        entry_BRK = (chosen_BRK - first_BR[..., None]) * ratio
        distances[stage] = (last_rows(position_BT, rows)[..., None] - entry_BRK).where(chosen_BRK >= 0, -1)
    return distances


def selected_distances(model: GSM, seen: Recording) -> dict[int, Tensor]:
    """Return the distances of ``selections`` of all rows in one list, without -1, int64 [N], by stage."""
    return {stage: back_BRK[back_BRK >= 0] for stage, back_BRK in selections(model, seen).items()}


def selected_weights(model: GSM, seen: Recording, rows: int) -> dict[int, Tensor]:
    """Return the weights of the last rows of the first sequence on their selected entries, float [R, T], by stage.

    A weight is the mean over heads. Every token of an entry gets the weight of the entry; tokens that are not selected
    get NaN.

    Args:
        model: the recorded model.
        seen: a recording of one call without a memory (``position``, ``stage/<s>/top_k``, ``stage/<s>/weights``).
        rows: number of rows (R).
    """
    length, maps = seen["position"].shape[1], {}
    for stage, back_BRK in selections(model, seen).items():
        back_RK = back_BRK[0, -rows:]
        weight_RE = seen[f"stage/{stage}/weights"][0, -rows:].float().mean(dim=1)
        weight_RK = weight_RE[:, weight_RE.shape[1] - 1 - back_RK.shape[1] : -1]
        row_R1 = torch.arange(length - len(back_RK), length, device=back_RK.device)[:, None]
        map_RT = weight_RE.new_full((len(back_RK), length + 1), torch.nan)  # the last column is for slots of -1
        for offset in range(model.geometry.encoder_ratio):
            place_RK = (row_R1 - back_RK + offset).where(back_RK >= 0, length)
            map_RT.scatter_(1, place_RK, weight_RK)
        maps[stage] = map_RT[:, :length]
    return maps
