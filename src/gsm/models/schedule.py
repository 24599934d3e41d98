"""The number of rows that each layer computes. Training requests all rows, prefill the last one, with the same code.

    GSM, one requested row, W = 4, M = 7, banks up to layer 3, T = 20 new positions:

    layer       1    2    3    4    state   decoder
    rows       20   20   10    7      7        1

    The first 12 of these positions as a chunk, where the requested row comes 8 positions later (R = 1 - 8):

    rows       12   12    2    0      0        0

M is the number of state entries that a decoder row reads. A layer that computes R rows reads R + W - 1 positions of the
layer below (its window), so each layer computes W - 1 rows fewer than the one below it. Banks and recurrences need
every position, so all layers below the last of them compute all rows (paper, equation 14). A layer with a convolution
computes a few rows more, because its first rows lack the tokens before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The numbers of rows in one call.

    Attributes:
        encoder, decoder: rows of each layer, at least 0.
        writer: rows of the last encoder layer that enter the stages and the state writer. Rows that lack tokens of a
            convolution are left out.
        state: the last of these rows, for which the writer makes state entries.
        decoder_input: rows that enter the first decoder layer.
    """

    encoder: list[int]
    decoder: list[int]
    writer: int = 0
    state: int = 0
    decoder_input: int = 0


def non_negative(rows: Sequence[int]) -> list[int]:
    """Return the numbers of rows, with 0 for negative ones, whose rows all belong to later calls."""
    return [max(0, count) for count in rows]


def stack_rows(new: int, rows: int, reaches: Sequence[int | None]) -> list[int]:
    """Return how many rows each layer of a stack must compute for the requested rows of the top layer.

    Args:
        new: new positions of the call (T).
        rows: requested rows (R). R = T: all, as in training. R <= 0: the first needed row comes 1 - R positions after
            this call.
        reaches: for each layer, the number of earlier positions of its input that a row needs; None: all of them.

    Returns:
        The number of positions that enter the first layer, then the rows of each layer. The top layer computes R rows.
        Below a layer with reach c and R rows, min(T, R + c) rows are computed. The numbers may be negative.
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
        encoder, decoder: the reach of each layer, as in ``stack_rows``.
        state_size: number of positions whose entries a decoder row sees: M, or M / J if the writer writes J entries per
            position.
        writer_reach: number of earlier positions that the state writer needs to make an entry.
        incomplete: number of rows at the beginning of a pruned call's encoder output that lack tokens of a convolution.
    """
    decoder_input, *decoded = stack_rows(new, rows, decoder)
    state = min(new, max(state_size + decoded[0] - 1, decoder_input))
    writer = min(new, state + writer_reach)
    _, *encoded = stack_rows(new, min(new, writer + incomplete), encoder)
    return Schedule(non_negative(encoded), non_negative(decoded), *non_negative([writer, state, decoder_input]))


def local_reach(*, encoder_layers: int, decoder_layers: int, window: int, state_size: int, reach: int = 0) -> int:
    """Return the largest distance in positions over which a token can influence another without a bank, in GSM or in
    the baseline, whichever is larger.

    In GSM this is the sum of the windows of all encoder layers, the state, and ``reach``, that of convolutions, writer
    and reader. In the baseline it is the sum of the windows of all layers.
    """
    return max(encoder_layers * (window - 1) + state_size + reach, (encoder_layers + decoder_layers) * (window - 1))
