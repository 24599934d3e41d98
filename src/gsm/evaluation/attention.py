"""Where attention goes, put together from taps: over the positions of a text, and over the entries of the state.

B sequences, T positions, R rows, H heads, W window entries, K selected slots, E weights of a row, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.models.gsm import GSM
from gsm.observe import Seen
from gsm.shapes import last


def attention_map(model: GSM, seen: Seen, name: str, sequence: int = 0) -> Tensor:
    """How much every row looks at every position of a sequence, float [R, T]: the mean over heads.

    The weight of a bank entry is divided evenly among its tokens; entries of the state that one position has written
    are added up. What a row of the map lacks to 1 goes to the sink. Arguments as of ``attention_parts``.
    """
    near_RT, far_RT = attention_parts(model, seen, name, sequence)
    return near_RT + far_RT


def attention_parts(model: GSM, seen: Seen, name: str, sequence: int = 0) -> tuple[Tensor, Tensor]:
    """The same in two maps: what the window gives (the state's entries, of a decoder layer), and what the bank gives.

    Args:
        model: the model that was recorded.
        seen: one call without a memory, on one document from its beginning (``position``, ``<name>/weights``, and
            ``<name>/top_k`` where a bank is read).
        name: ``encoder/<l>``, ``stage/<s>`` or ``decoder/<l>``.
        sequence: which of the batch.
    """
    weight_RE, length = seen[f"{name}/weights"][sequence].mean(dim=1), seen["position"].shape[1]
    rows, chosen_BRK = weight_RE.shape[0], seen.get(f"{name}/top_k")
    window = weight_RE.shape[1] - 1 - (0 if chosen_BRK is None else chosen_BRK.shape[2])
    entries = model.writer.slots if name.startswith("decoder/") else 1  # of a position
    row_R1 = torch.arange(length - rows, length, device=weight_RE.device)[:, None]
    position_RW = row_R1 - torch.arange(window - 1, -1, -1, device=weight_RE.device) // entries
    near_RT, far_RT = weight_RE.new_zeros(2, rows, length)
    near_RT.scatter_add_(1, position_RW.clamp(min=0), weight_RE[:, :window] * (position_RW >= 0))
    if chosen_BRK is not None:
        ratio, chosen_RK = model.geometry.encoder_ratio, chosen_BRK[sequence]
        share_RK = weight_RE[:, window:-1] * (chosen_RK >= 0) / ratio
        for offset in range(ratio):
            far_RT.scatter_add_(1, chosen_RK.clamp(min=0) * ratio + offset, share_RK)
    return near_RT, far_RT


def decoder_attention(model: GSM, seen: Seen) -> Tensor:
    """What the decoder's layers look at, float32 [L, E]: the mean over heads, and over the rows that see a whole state;
    where none does, over all but padding."""
    first = model.geometry.encoder_layers + 1
    weights = [seen[f"decoder/{layer}/weights"] for layer in range(first, model.geometry.depth + 1)]
    position_BR = last(seen["position"], weights[0].shape[1])
    whole_BR = position_BR >= model.writer.positions - 1
    counted_BR = whole_BR if whole_BR.any() else position_BR >= 0
    return torch.stack([weight_BRHE[counted_BR].float().mean(dim=(0, 1)) for weight_BRHE in weights])
