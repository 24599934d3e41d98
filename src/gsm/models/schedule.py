"""How many rows each layer has to produce: prefill is pruned by asking for fewer, never by a second code path.

    GSM, one row asked for, W = 4, M = 7, banks up to layer 3, N = 20 new positions:

    layer       1    2    3    4    state   decoder
    rows       20   20   10    7      7        1

A layer that produces R rows reads R + W - 1 positions of the layer below (its window), so ranges shrink upwards by W
- 1 a layer; banks need every position, so nothing shrinks below the last bank (paper, equation 14).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Rows(NamedTuple):
    """Rows of each encoder layer, of stages and state, and of each decoder layer."""

    encoder: list[int]
    state: int
    decoder: list[int]


def gsm_rows(
    new: int,
    rows: int,
    *,
    encoder_layers: int,
    decoder_layers: int,
    last_bank: int,
    window: int,
    state_size: int,
    reach: int = 0,
) -> Rows:
    """The schedule of GSM.

    Args:
        new: new positions of the call (N).
        rows: rows asked for (R); R = N is training.
        last_bank: last encoder layer that owns a bank (the paper's l*).
        state_size: positions whose entries a decoder row sees: M, or M / J if the writer writes J for each.
        reach: positions before these that the state writer needs.
    """
    state = min(new, state_size + rows - 1 + reach)
    above = [
        min(new, state + (encoder_layers - layer) * (window - 1)) for layer in range(last_bank, encoder_layers + 1)
    ]
    return Rows([new] * (last_bank - 1) + above, state, [rows] * decoder_layers)


def baseline_rows(new: int, rows: int, *, encoder_layers: int, decoder_layers: int, window: int) -> Rows:
    """The schedule of the baseline: the decoder's bank needs the whole encoder; the decoder's windows shrink above
    it, exactly."""
    decoder = [min(new, rows + (decoder_layers - layer) * (window - 1)) for layer in range(1, decoder_layers + 1)]
    return Rows([new] * encoder_layers, 0, decoder)


def comparator_rows(new: int, rows: int, reaches: Sequence[int | None]) -> list[int]:
    """The schedule of a stack of any mixers, pruned exactly, from the top downwards.

    Args:
        new: new positions of the call (N).
        rows: rows asked for (R); R = N is training.
        reaches: of each layer, how many positions back of its input a row needs; None: all of them.

    Returns:
        Rows of each layer: those asked for at the top; below a layer with reach c that produces R rows, min(N, R + c).
    """
    wanted = [rows]
    for reach in reversed(reaches[1:]):
        wanted.append(new if reach is None else min(new, wanted[-1] + reach))
    return wanted[::-1]


def local_reach(*, encoder_layers: int, decoder_layers: int, window: int, state_size: int, reach: int = 0) -> int:
    """Positions back that nothing but a bank reaches beyond, in GSM and in the baseline alike.

    GSM's windows carry something through the encoder one after another, and then the state once more, with the
    ``reach`` of its writer; the baseline's windows carry it through all layers.
    """
    return max(encoder_layers * (window - 1) + state_size + reach, (encoder_layers + decoder_layers) * (window - 1))
