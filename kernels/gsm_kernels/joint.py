"""One softmax over a window, far entries and a sink, for the references of `attend`, `attend_band` and `indexer_kl`.

Queries are cut into blocks. A block sees a short contiguous run of the stream, so its logits are one matrix product:

    stream   . . . . . . . . . . . . . . . . . .
    block 1        q q q q                         Q queries ...
                 y y y y y y y                     ... see Y = Q + width - 1 entries
    block 2                q q q q
                         y y y y y y y

Letters in addition to B R H C E: n blocks per sequence, Q queries per block, Y entries that a block sees, G far entries
that a row sees (a bank, or K entries gathered from it), Z = Y + G + 1 columns of the softmax; the last is the sink.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import slices

LOWEST = -1e30  # smallest logit of a sink


class Cut(NamedTuple):
    """The division of the R rows at the end of E entries into blocks.

    Attributes:
        rows, entries: R and E.
        width: entries that a row sees at most, itself included.
        size: Q, queries per block.
        count: n, blocks per sequence.
    """

    rows: int
    entries: int
    width: int
    size: int
    count: int

    @property
    def padded(self) -> int:
        """Rows of all blocks, n * Q >= R."""
        return self.size * self.count

    @property
    def span(self) -> int:
        """Y: entries that any row of a block may see."""
        return self.size + self.width - 1


class Far(NamedTuple):
    """The far entries of rows: keys [B,G,C] (shared by all rows) or [B*nQ,G,C], and a logit bias [B,nQ,G]."""

    keys: Tensor
    bias_BRG: Tensor


def cut(rows: int, entries: int, width: int) -> Cut:
    """Cut rows into blocks of about `width` queries, at least 16.

    Smaller blocks make small matrix products; larger blocks compute more logits that are masked.
    """
    width = max(min(width, entries), 1)
    count = -(-rows // max(width, 16)) if rows else 0
    return Cut(rows, entries, width, -(-rows // count) if count else 0, count)


def pad_rows(x: Tensor, cut: Cut, value: float = 0.0) -> Tensor:
    """Append rows of `value` to x [B,R,...], up to [B,nQ,...]."""
    missing = cut.padded - x.shape[1]
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing), value=value) if missing else x


def window_blocks(window_BEC: Tensor, cut: Cut) -> Tensor:
    """Return the entries that each block sees, [B*n,Y,C], with zeros before and after the stream."""
    before = cut.entries - cut.rows - (cut.width - 1)
    padding = (0, 0, max(-before, 0), cut.padded - cut.rows)
    padded = F.pad(window_BEC[:, max(before, 0) :], padding)
    return padded.unfold(1, cut.span, cut.size).mT.reshape(-1, cut.span, window_BEC.shape[-1])


def window_visible(position_BR: Tensor, cut: Cut) -> Tensor:
    """Return which entries of its block each row sees, bool [B,nQ,Y]: at most `width`, within the row's document."""
    device = position_BR.device
    index_R = torch.arange(cut.entries - cut.rows, cut.entries, device=device)
    reach_BR = pad_rows(torch.minimum(position_BR, index_R.clamp(max=cut.width - 1))[..., None], cut, -1)
    row_Q = torch.arange(cut.size, device=device)[:, None]
    distance_QY = row_Q + (cut.width - 1) - torch.arange(cut.span, device=device)
    reach_BnQ1 = reach_BR.unflatten(1, (cut.count, cut.size))
    return ((distance_QY >= 0) & (distance_QY <= reach_BnQ1)).flatten(1, 2)


def probabilities(query_BRHC: Tensor, window: Tensor, visible_BRY: Tensor, sink_H: Tensor, far: Far | None) -> Tensor:
    """Return the joint softmax, [B*n,Q*H,Z]. Its columns are Y window entries, G far entries, and the sink.

    Args:
        query_BRHC: rotated and scaled queries, R = nQ rows.
        window: [B*n,Y,C] from `window_blocks`.
        visible_BRY: from `window_visible`.
        sink_H: the logit of each head's sink; with -inf the sink gets weight only in rows that see no entry.
        far: far entries, or None.
    """
    heads = query_BRHC.shape[2]
    near = _logits(query_BRHC, window, as_bias(visible_BRY, query_BRHC.dtype))
    parts = [near] if far is None else [near, _logits(query_BRHC, far.keys, far.bias_BRG)]
    # The clamp keeps a row that sees nothing finite: its softmax over -inf alone would be NaN.
    sink = sink_H.clamp(min=LOWEST).repeat(near.shape[:2].numel() // heads)
    return torch.softmax(join(parts, sink, window.shape[0]), -1)


def _logits(query_BRHC: Tensor, keys: Tensor, bias_BRG: Tensor) -> Tensor:
    """Return query . key + bias, [b,rows,G], where b is the batch of the keys: B, B*n or B*nQ."""
    batches, columns, _ = keys.shape
    query = query_BRHC.reshape(batches, -1, query_BRHC.shape[3])
    bias_BRHG = bias_BRG[:, :, None].expand(-1, -1, query_BRHC.shape[2], -1)
    # Contiguous, because otherwise the CPU multiplies one batch at a time, ten times slower for small batches.
    logits = bias_BRHG.clone(memory_format=torch.contiguous_format).view(batches, query.shape[1], columns)
    return logits.baddbmm_(query, keys.mT)


def join(parts: list[Tensor], last: Tensor, blocks: int) -> Tensor:
    """Concatenate columns to [B*n,Q*H,Z]. Parts may have different batches; `last` is the column of the sink."""
    columns = [part.flatten(0, 1) for part in parts]
    return torch.cat((*columns, last[:, None]), 1).unflatten(0, (blocks, -1))


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a logit bias: 0 for visible entries, -inf for the others."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)


def chunks(cut: Cut, heads: int, far: int, other: int, budget: int) -> list[slice]:
    """Split the rows into ranges of whole blocks, so that the largest temporary tensor fits the budget.

    Args:
        cut: the blocks.
        heads: B * H, the heads of all sequences.
        far: G, far entries per row.
        other: elements per row of the largest temporary tensor besides the logits.
        budget: number of elements.
    """
    if cut.rows == 0:
        return []
    per_row = max(heads * (cut.span + far + 1), other)
    step = max(1, budget // max(1, per_row * cut.size)) * cut.size
    return slices(cut.rows, step)
