"""What all attention of the models has in common: a query, a sink, an output projection, and how they read what a
layer sees.

Encoder layers, the baseline's decoder layers, aggregation stages and GSM's decoder layers differ only in where the
entries come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gsm.cache.view import Attended
from gsm.costs.primitives import AttentionCost, ProductCost, attention, products
from gsm.layers.indexer_training import KL, IndexerTraining
from gsm.layers.projections import Output, Query, Shape
from gsm.layers.rope import Angles, Rope
from gsm.layers.search import Selection
from gsm.observe import tap
from gsm.shapes import promoted
from gsm_kernels import IndexerLoss, attend, attend_band, rotate


class LatentAttention(nn.Module):
    """Query, sink and output projection of one attention (the paper's Query, Attn and Output).

    Args:
        dim_in: width of the query's input.
        shape: shared widths.
        window: entries of the window that a row sees, itself included.
        rope: rotation of queries and outputs; that of the entries.
        name: what its taps are called, e.g. ``encoder/3``.
        indexer_training: how an indexer that searches for it learns; None: as by default.
    """

    def __init__(
        self,
        dim_in: int,
        shape: Shape,
        *,
        window: int,
        rope: Rope,
        name: str,
        indexer_training: IndexerTraining | None = None,
    ):
        super().__init__()
        self.window_size, self.rope, self.name = window, rope, name
        self.indexer_training = indexer_training or KL()
        self.query = Query(dim_in, shape, rope.query_scale)
        self.sink = nn.Parameter(torch.zeros(shape.heads))
        self.output = Output(shape)

    def read(self, query_BRHC: Tensor, view: Attended, position_BR: Tensor, angles: Angles) -> Tensor:
        """One softmax over window and selected slots, with the sink in the denominator; then the output projection.
        [B, R, D]."""
        looked_at = (query_BRHC, view, position_BR, self.window_size, self.sink, angles)
        tap(f"{self.name}/weights", lambda: attention_weights(*looked_at))
        band = (view.window_BEC, position_BR, self.window_size, self.sink, *angles)
        if view.bank is None or view.chosen_BRK is None:
            return self.output(attend_band(query_BRHC, *band))
        return self.output(attend(query_BRHC, *band, view.bank.entry_BFC, view.chosen_BRK, view.bias_BRK))

    def choose(self, view: Attended, found: Selection) -> Attended:
        """The view with the selection; in training with what its indexer learns by from whoever reads it."""
        if self._teaches(found):
            found = found._replace(bias_BRK=self.indexer_training.bias(found))
        return view.choose(found.chosen_BRK, found.bias_BRK)

    def learn(
        self, query_BRHC: Tensor, found: Selection, view: Attended, position_BR: Tensor, angles: Angles
    ) -> IndexerLoss | None:
        """The loss of the indexer that has searched for this attention; None when there is nothing to learn from."""
        if not self._teaches(found):
            return None
        looked_at = (query_BRHC, view, position_BR, self.window_size, self.sink, angles)
        return self.indexer_training.loss(found, *looked_at)

    def reading(self) -> dict[str, ProductCost]:
        """What it costs for each row, besides what the row looks at."""
        read_and_written = ProductCost(moved=2 * self.query.width)
        return {"projections": products(self.query, self.output, self.sink), "attention": read_and_written}

    def seeing(self, limit: int, **options) -> AttentionCost:
        """At most so many entries for each row; options as of ``AttentionCost``."""
        return attention(self.query.width, self.query.width // self.query.heads, limit, **options)

    def _teaches(self, found: Selection) -> bool:
        """Whether an indexer has searched that may learn in this call."""
        return self.training and torch.is_grad_enabled() and found.index is not None and found.chosen_BRK is not None


def attention_weights(
    query_BRHC: Tensor, view: Attended, position_BR: Tensor, window: int, sink_H: Tensor, angles: Angles
) -> Tensor:
    """Attention weights for looking at, not for computing with: the kernels never form them.

    Returns:
        weights_BRHE: over the window (oldest first, ``window`` places), then the selected slots, then the sink. Rows
            sum to 1.
    """
    query_BRHC = promoted(rotate(query_BRHC, *angles))
    rows, stored = query_BRHC.shape[1], view.window_BEC.shape[1]
    row_R = torch.arange(stored - rows, stored, device=query_BRHC.device)
    back_W = torch.arange(window - 1, -1, -1, device=query_BRHC.device)
    index_RW = row_R[:, None] - back_W
    entry_BRKC = view.window_BEC[:, index_RW.clamp(min=0)]
    seen_BRK = back_W <= position_BR[..., None]
    if view.bank is not None and view.chosen_BRK is not None and view.bank.entry_BFC.shape[1]:
        row_BRK = view.chosen_BRK.clamp(min=0)
        picked_BRKC = view.bank.entry_BFC[torch.arange(len(row_BRK), device=row_BRK.device)[:, None, None], row_BRK]
        entry_BRKC, seen_BRK = torch.cat([entry_BRKC, picked_BRKC], 2), torch.cat([seen_BRK, view.chosen_BRK >= 0], 2)
    logit_BRHK = torch.einsum("brhc,brkc->brhk", query_BRHC, promoted(entry_BRKC)) * query_BRHC.shape[-1] ** -0.5
    logit_BRHK = logit_BRHK.masked_fill(~seen_BRK[:, :, None], float("-inf"))
    sink_BRH1 = promoted(sink_H)[:, None].expand(*logit_BRHK.shape[:3], 1)
    return torch.cat([logit_BRHK, sink_BRH1], dim=-1).softmax(dim=-1)
