"""Rows in chunks: ranges of rows of all sequences for PyTorch, and chunks of [B,R,...] for kernels.

A kernel that works in chunks takes rows [row0, row0 + rows) of the sequences from batch0 on; `line` counts the rows of
a chunk, and a chunk's buffers have one line per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

SCRATCH = 12 << 20  # 4-byte elements in a chunk's buffers, about the L2 cache of a Hopper GPU


def slices(rows: int, step: int) -> list[slice]:
    """Split all rows into ranges of `step`; the last range may be shorter."""
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class Rows(NamedTuple):
    """A chunk: rows [row0, row0 + rows) of the sequences [batch0, batch0 + batches)."""

    batch0: int
    batches: int
    row0: int
    rows: int

    @property
    def lines(self) -> int:
        """Number of rows in all its sequences."""
        return self.batches * self.rows

    def place(self, length: int) -> tuple[int, int, int, int]:
        """Return its place among sequences of `length` rows, as kernels take it: batch0, row0, rows, R."""
        return self.batch0, self.row0, self.rows, length


def row_chunks(shape: Sequence[int], per_row: int) -> Iterator[Rows]:
    """Yield chunks of a [B,R,...]: whole sequences, or rows of a sequence. Their buffers fit the scratch memory.

    `per_row` is the number of elements per row in these buffers.
    """
    batch, rows = shape[:2]
    fit = max(SCRATCH // max(per_row, 1), 1)
    if rows <= fit:
        step = fit // max(rows, 1)
        yield from (Rows(start, min(step, batch - start), 0, rows) for start in range(0, batch, step))
        return
    fit = max(fit // 64, 1) * 64 if fit >= 64 else fit  # whole tiles of rows
    for sequence in range(batch):
        yield from (Rows(sequence, 1, start, min(fit, rows - start)) for start in range(0, rows, fit))


def lines_of(x: Tensor, part: Rows) -> Tensor:
    """Return the lines of a chunk in a contiguous [B,R,...], where they are adjacent."""
    return x.flatten(0, 1)[part.batch0 * x.shape[1] + part.row0 :][: part.lines]
