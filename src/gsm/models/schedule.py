"""How many rows each layer has to produce: prefill is pruned by asking for fewer, never by a second code path.

    GSM, one row asked for, W = 4, M = 7, banks up to layer 3, T = 20 new positions:

    layer       1    2    3    4    state   decoder
    rows       20   20   10    7      7        1

    the first 12 of them, a row asked for 8 positions later (R = 1 - 8)

    rows       12   12    2    0      0        0

A layer that produces R rows reads R + W - 1 positions of the layer below (its window), so ranges shrink upwards by W
- 1 a layer; banks need every position, so nothing shrinks below the last bank (paper, equation 14).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Rows of one call.

    Attributes:
        encoder, decoder: rows that each of their layers produces, at least 0.
        writer: positions that enter stages and state writer: the rows of the last encoder layer.
        state: of these, positions whose entries of the state are wanted.
        decoder_input: positions that enter the decoder's first layer.
    """

    encoder: list[int]
    decoder: list[int]
    writer: int = 0
    state: int = 0
    decoder_input: int = 0


def at_least_none(rows: Sequence[int]) -> list[int]:
    """0 where a row that is wanted comes so much later that nothing of a call is needed for it."""
    return [max(0, one) for one in rows]


def stack_rows(new: int, rows: int, reaches: Sequence[int | None]) -> list[int]:
    """The rows of a stack of any mixers, pruned exactly, from the top downwards; before them, the positions that enter.

    Args:
        new: new positions of the call (T).
        rows: rows asked for (R); R = T is training; R <= 0: a row 1 - R positions after these.
        reaches: of each layer, how many positions back of its input a row needs; None: all of them.

    Returns:
        One number more than there are layers: the positions that enter the first one, and the rows of each: those
        asked for at the top; below a layer with reach c that produces R rows, min(T, R + c), which may be negative.
    """
    wanted = [rows]
    for reach in reversed(reaches):
        wanted.append(new if reach is None else min(new, wanted[-1] + reach))
    return wanted[::-1]


def gsm_schedule(
    new: int,
    rows: int,
    *,
    encoder_layers: int,
    last_bank: int,
    window: int,
    state_size: int,
    reaches: Sequence[int],
    writer_reach: int = 0,
) -> Schedule:
    """The schedule of GSM.

    Args:
        new: new positions of the call (T).
        rows: rows asked for (R), as of ``stack_rows``.
        encoder_layers: depth of the encoder.
        last_bank: last encoder layer that owns a bank (the paper's l*).
        window: entries of an encoder layer's window (W).
        state_size: positions whose entries a decoder row sees: M, or M / J if the writer writes J for each.
        reaches: of each decoder layer, how many positions back of its input a row needs.
        writer_reach: positions before those of the state that the state writer needs.
    """
    decoder_input, *decoder = stack_rows(new, rows, reaches)
    state = min(new, max(state_size + decoder[0] - 1, decoder_input))
    writer = min(new, state + writer_reach)
    above = [
        min(new, writer + (encoder_layers - layer) * (window - 1)) for layer in range(last_bank, encoder_layers + 1)
    ]
    encoder = at_least_none([new] * (last_bank - 1) + above)
    return Schedule(encoder, at_least_none(decoder), *at_least_none([writer, state, decoder_input]))


def local_reach(*, encoder_layers: int, decoder_layers: int, window: int, state_size: int, reach: int = 0) -> int:
    """Positions back that nothing but a bank reaches beyond, in GSM and in the baseline alike.

    GSM's windows carry something through the encoder one after another, and then the state once more, with the
    ``reach`` of its writer and of its reader; the baseline's windows carry it through all layers.
    """
    return max(encoder_layers * (window - 1) + state_size + reach, (encoder_layers + decoder_layers) * (window - 1))
