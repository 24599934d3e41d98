"""Attention rollout (Abnar and Zuidema, 2020) for GSM: attention weights, multiplied through the layers, banks, stages
and writer, give the source positions of each entry of the state, and the *way* from there: the encoder or a stage.

    A_0 = 1,    A_l = (A_(l-1) + near_l A_(l-1) + far_l A_(b-1)) / its sum            encoder layer l, bank of layer b
    stage s on layer l:    near_s A_(l-1) + far_s A_(b-1), divided by its sum
    state:                 sum over ways of share x map,  share of a way: the norm of the part of z that it contributes

near are the weights on the window, far those on the bank. A layer's output is the sum of its residual stream and what
it reads; the latter counts by the sum of its weights without the sink's. Equal weights mean about equal contributions,
because a norm gives all entries about the same length. As any rollout, this ignores the feed-forwards, the length of a
layer's update relative to its stream, short convolutions, the mixing of several residual streams, and queries.
``gsm.analysis.attribution`` compares it with gradients and interventions.

S ways: the encoder, then each stage. T positions, R rows, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsm.analysis.attention import attention_map, attention_parts, decoder_layers, with_recurrences
from gsm.models.gsm import GSM
from gsm.observe import Recording

TAPS = ("position", "encoder/*/weights", "*/top_k", "stage/*", "state/e", "decoder/*/weights")


@dataclass(frozen=True)
class Routes:
    """The sources of the state entries of one sequence.

    Attributes:
        names: names of the ways: ``encoder``, ``stage/1``, ...
        share_STT: float, the share of the entry of a row (second dimension) that each way (first) brings from each
            position (third); the sum over ways and positions is 1.
    """

    names: tuple[str, ...]
    share_STT: Tensor

    @property
    def total_TT(self) -> Tensor:
        """The share of each row's entry (first dimension) from each position (second) by all ways; rows sum to 1."""
        return self.share_STT.sum(dim=0)

    @property
    def way_ST(self) -> Tensor:
        """The share of each way in each row's entry; columns sum to 1."""
        return self.share_STT.sum(dim=-1)


def state_routes(model: GSM, seen: Recording, sequence: int = 0) -> Routes:
    """Return the rollout from source positions to every entry of the state.

    Args:
        model: the recorded model.
        seen: a recording of one call for all rows without a memory, with one document per sequence (``TAPS``).
        sequence: index of the sequence in the batch.

    Raises:
        ValueError: if the model is no GSM, the call did not compute all rows, or an encoder layer is recurrent and has
            no attention weights.
    """
    layers_LTT = encoder_rollout(model, seen, sequence)
    maps, names = [layers_LTT[-1]], ["encoder"]
    for stage, layer in enumerate(model.aggregation.layers, 1):
        read_TT = _read(model, seen, f"stage/{stage}", sequence, layers_LTT, layer)
        names.append(f"stage/{stage}")
        maps.append(read_TT / read_TT.sum(dim=-1, keepdim=True).clamp(min=1e-12))
    share_ST = parts_of_state(model, seen, sequence)
    return Routes(tuple(names), share_ST[..., None] * torch.stack(maps))


def encoder_rollout(model: GSM, seen: Recording, sequence: int = 0) -> Tensor:
    """Return A_0 to A_L, the rollout up to each encoder layer, float [L + 1, T, T]; rows sum to 1. Arguments and errors
    are those of ``state_routes``."""
    if layers := with_recurrences(model):
        raise ValueError(
            "encoder_layer must be attention, as recurrences have no attention weights, got other mixers in layers "
            f"{layers}"
        )
    length, first = seen["position"].shape[1], seen["encoder/1/weights"]
    if first.shape[1] != length or seen["state/e"].shape[1] != length:
        raise ValueError(f"rows must be all {length} of a call without a memory, got fewer")
    maps_LTT = [torch.eye(length, dtype=first.dtype, device=first.device)]
    for layer in range(1, model.geometry.encoder_layers + 1):
        read_TT = _read(model, seen, f"encoder/{layer}", sequence, maps_LTT, layer)
        mixed_TT = maps_LTT[-1] + read_TT
        maps_LTT.append(mixed_TT / mixed_TT.sum(dim=-1, keepdim=True))
    return torch.stack(maps_LTT)


def parts_of_state(model: GSM, seen: Recording, sequence: int = 0) -> Tensor:
    """Return the share of each way in z, float [S, T]: how much of its norm z loses if the writer gets zeros from this
    way."""
    parts = [seen["state/e"], *(seen[f"stage/{stage}/increment"] for stage, _ in enumerate(model.aggregation, 1))]
    parts = [part_BTD[sequence, None] for part_BTD in parts]
    with torch.no_grad():
        whole_1TD = _fused(model, parts)
        without = [parts[:way] + [torch.zeros_like(part)] + parts[way + 1 :] for way, part in enumerate(parts)]
        length_ST = torch.cat([(whole_1TD - _fused(model, less)).norm(dim=-1) for less in without])
    return length_ST / length_ST.sum(dim=0).clamp(min=1e-12)


def decoder_rollout(model: GSM, seen: Recording, sequence: int = 0) -> Tensor:
    """Return the share of each position in the decoder's output at each row, float [R, T]; rows sum to 1.

    A row starts from z (or from the encoder's streams) at its own position, and each layer adds what it reads from the
    state: E_l = (E_(l-1) + map_l) / its sum.
    """
    rows, length = seen[f"decoder/{model.geometry.depth}/weights"].shape[1], seen["position"].shape[1]
    mixed_RT = torch.eye(length, dtype=seen["state/e"].dtype, device=seen["position"].device)[-rows:]
    for layer in decoder_layers(model):
        mixed_RT = mixed_RT + attention_map(model, seen, f"decoder/{layer}", sequence)
        mixed_RT = mixed_RT / mixed_RT.sum(dim=-1, keepdim=True)
    return mixed_RT


def _read(model: GSM, seen: Recording, name: str, sequence: int, maps: Tensor | list[Tensor], layer: int) -> Tensor:
    """Return the rollout of one attention on encoder layer ``layer``, [T, T]; rows sum to 1 minus the sink's weight."""
    near_TT, far_TT = attention_parts(model, seen, name, sequence)
    owner = max((bank for bank in model.geometry.bank_layers if bank <= layer), default=layer)
    return near_TT @ maps[layer - 1] + far_TT @ maps[owner - 1]


def _fused(model: GSM, parts: list[Tensor]) -> Tensor:
    return model.writer.fuse(parts[0], tuple(parts[1:]))
