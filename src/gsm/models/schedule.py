"""The number of rows that each layer computes. Prefill requests fewer rows; it has no code path of its own.

    GSM, one requested row, W = 4, M = 7, banks up to layer 3, T = 20 new positions:

    layer       1    2    3    4    state   decoder
    rows       20   20   10    7      7        1

    the first 12 of these positions, with the requested row 8 positions later (R = 1 - 8):

    rows       12   12    2    0      0        0

A layer that computes R rows reads R + W - 1 positions of the layer below (its window), so the number of rows falls by W
- 1 per layer upwards. Banks need every position, so no layer below the last bank can compute fewer (paper, equation
14). The first rows of a layer with a convolution are incomplete, so it computes a few more. A recurrence needs every
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Rows of one call.

    Attributes:
        encoder, decoder: rows of each layer, at least 0.
        writer: positions that enter stages and state writer: the rows of the last encoder layer, without incomplete
            ones.
        state: trailing positions of these that get entries in the state.
        decoder_input: positions that enter the decoder's first layer.
    """

    encoder: list[int]
    decoder: list[int]
    writer: int = 0
    state: int = 0
    decoder_input: int = 0


def non_negative(rows: Sequence[int]) -> list[int]:
    """Return the numbers of rows, with 0 for negative ones: their requested row lies too far ahead for this call."""
    return [max(0, count) for count in rows]


def stack_rows(new: int, rows: int, reaches: Sequence[int | None]) -> list[int]:
    """Return the positions that enter a stack of mixers, then the rows of each layer, pruned exactly.

    Args:
        new: new positions of the call (T).
        rows: requested rows (R); R = T is training; R <= 0: a row 1 - R positions after these.
        reaches: for each layer, the number of earlier positions of its input that a row needs; None: all of them.

    Returns:
        One number more than layers: the positions that enter the first layer, and the rows of each layer. The top layer
        computes the requested rows. The layer below a layer with reach c and R rows computes min(T, R + c), which may
        be negative.
    """
    wanted = [rows]
    for reach in reversed(reaches):
        wanted.append(new if reach is None else min(new, wanted[-1] + reach))
    return wanted[::-1]


def gsm_schedule(
    new: int,
    rows: int,
    *,
    encoder: Sequence[int | None],
    decoder: Sequence[int | None],
    state_size: int,
    writer_reach: int = 0,
    incomplete: int = 0,
) -> Schedule:
    """Return the schedule of GSM.

    Args:
        new: new positions of the call (T).
        rows: requested rows (R), as in ``stack_rows``.
        encoder, decoder: the reaches of the layers, as in ``stack_rows``.
        state_size: number of positions with entries that a decoder row sees: M, or M / J if the writer writes J each.
        writer_reach: number of positions before those of the state that the state writer needs.
        incomplete: number of rows at the beginning of the encoder's output that the writer cannot use in a pruned call.
    """
    decoder_input, *decoded = stack_rows(new, rows, decoder)
    state = min(new, max(state_size + decoded[0] - 1, decoder_input))
    writer = min(new, state + writer_reach)
    _, *encoded = stack_rows(new, min(new, writer + incomplete), encoder)
    return Schedule(non_negative(encoded), non_negative(decoded), *non_negative([writer, state, decoder_input]))


def local_reach(*, encoder_layers: int, decoder_layers: int, window: int, state_size: int, reach: int = 0) -> int:
    """Return the distance in positions beyond which only a bank reaches, in GSM and in the baseline.

    In GSM, the windows of all encoder layers add up, then the state, and the ``reach`` of convolutions, writer and
    reader. In the baseline, the windows of all layers add up.
    """
    return max(encoder_layers * (window - 1) + state_size + reach, (encoder_layers + decoder_layers) * (window - 1))
