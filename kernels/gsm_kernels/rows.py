"""Split [B,R,...] into chunks of rows: slices of R for PyTorch, and `Rows` for kernels.

A kernel that works in chunks takes rows [row0, row0 + rows) of `batches` sequences from batch0 on. A line is a row of
the chunk, counted from 0 over all its sequences; the buffers of a chunk have one line per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

SCRATCH = 12 << 20  # 4-byte elements in the buffers of a chunk: 48 MiB, about the L2 cache of a Hopper GPU


def slices(rows: int, step: int) -> list[slice]:
    """Split range(rows) into slices of `step`; the last may be shorter."""
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class Rows(NamedTuple):
    """A chunk: rows [row0, row0 + rows) of the sequences [batch0, batch0 + batches)."""

    batch0: int
    batches: int
    row0: int
    rows: int

    @property
    def lines(self) -> int:
        """Number of rows in all sequences of the chunk."""
        return self.batches * self.rows

    def place(self, length: int) -> tuple[int, int, int, int]:
        """Return the arguments that kernels take, for sequences of `length` rows: batch0, row0, rows, R."""
        return self.batch0, self.row0, self.rows, length


def row_chunks(shape: Sequence[int], per_row: int) -> Iterator[Rows]:
    """Yield the chunks of a [B,R,...], each several whole sequences or some rows of one, with buffers up to SCRATCH.

    Args:
        shape: B, R, and any further sizes.
        per_row: 4-byte elements per row in the buffers of a chunk.
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
    """Return the lines of a chunk, [lines,...], as a view of a contiguous [B,R,...]."""
    return x.flatten(0, 1)[part.batch0 * x.shape[1] + part.row0 :][: part.lines]
