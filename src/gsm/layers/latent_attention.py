"""What all attention of the models has in common: a query, a sink, an output projection, and how they read what a
layer sees.

Encoder layers, the baseline's decoder layers, aggregation stages and GSM's decoder layers differ only in where the
entries come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gsm.costs.primitives import AttentionCost, ProductCost, attention, products
from gsm.layers.attended import Attended
from gsm.layers.indexer_training import KL, IndexerTraining
from gsm.layers.projections import Output, Query, Shape
from gsm.layers.rope import Angles, Rope
from gsm.layers.search import Selection
from gsm.observe import Name, tap
from gsm.shapes import promoted
from gsm.span import Span
from gsm_kernels import IndexerLoss, attend, attend_band, rotate
from gsm_kernels.device import full_precision


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

    def read(self, query_BRHC: Tensor, attended: Attended, position_BR: Tensor, angles: Angles) -> Tensor:
        """One softmax over window and selected slots, with the sink in the denominator; then the output projection.
        [B, R, D]."""
        entry_BFC = None if attended.bank is None else attended.bank.entry_BFC
        selected = (entry_BFC, attended.chosen_BRK, attended.bias_BRK)
        return self.output(self.mix_entries(query_BRHC, attended.window_BEC, position_BR, angles, *selected))

    def mix_entries(
        self,
        query_BRHC: Tensor,
        window_BEC: Tensor,
        position_BR: Tensor,
        angles: Angles,
        entry_BFC: Tensor | None = None,
        chosen_BRK: Tensor | None = None,
        bias_BRK: Tensor | None = None,
        *,
        repeats: int = 1,
        tap_name: str = "weights",
    ) -> Tensor:
        """One softmax over the window and, where there is a selection, the selected entries, with the sink in the
        denominator. [B, R, H, C].

        Args:
            query_BRHC, window_BEC, position_BR, entry_BFC, chosen_BRK, bias_BRK: as of ``gsm_kernels.attend``.
            angles: rotation of the rows.
            repeats: every row is given so many times in a row, and the last of these counts.
            tap_name: what the weights are called behind the name of this layer.
        """
        band = (query_BRHC, window_BEC, position_BR, self.window_size, self.sink, *angles)
        others = () if entry_BFC is None or chosen_BRK is None else (entry_BFC, chosen_BRK, bias_BRK)
        return attend_tapped((self, tap_name), *band, *others, repeats=repeats)

    def choose(self, attended: Attended, found: Selection) -> Attended:
        """Adds the selection; in training also what its indexer learns by from whoever reads it."""
        if self._teaches(found):
            found = found._replace(bias_BRK=self.indexer_training.bias(found))
        return attended.choose(found.chosen_BRK, found.bias_BRK)

    def learn(
        self, query_BRHC: Tensor, found: Selection, attended: Attended, span: Span, angles: Angles
    ) -> IndexerLoss | None:
        """The loss of the indexer that has searched for the rows of this attention; None when there is nothing to learn
        from."""
        if not self._teaches(found):
            return None
        looked_at = (query_BRHC, attended, span.row_position_BR, self.window_size, self.sink, angles)
        return self.indexer_training.loss(found, *looked_at, pieces=span.pieces, tokens=span.tokens)

    def cost_of_rows(self, *others: nn.Module | None) -> dict[str, ProductCost]:
        """What all its parameters cost for each row, but those of ``others``, which are counted otherwise; besides what
        the row looks at."""
        met = [part for part in self.children() if part not in others]
        read_and_written = ProductCost(moved=2 * self.query.width)
        return {"projections": products(*met, *self.parameters(recurse=False)), "attention": read_and_written}

    def look_cost(self, limit: int, **options) -> AttentionCost:
        """At most so many entries for each row; options as of ``AttentionCost``."""
        return attention(self.query.width, self.query.width // self.query.heads, limit, **options)

    def _teaches(self, found: Selection) -> bool:
        """Whether an indexer has searched that may learn in this call."""
        return self.training and torch.is_grad_enabled() and found.index is not None and found.chosen_BRK is not None


def attend_tapped(
    name: Name,
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    entry_BFC: Tensor | None = None,
    chosen_BRK: Tensor | None = None,
    bias_BRK: Tensor | None = None,
    *,
    repeats: int = 1,
) -> Tensor:
    """Attention whose weights are shown under a name. The kernels never form them: they are computed for whoever looks,
    and if somebody replaces them, what the rows take is computed from the replaced ones. [B, R, H, C].

    Args:
        name: of the tap.
        repeats: every row is given so many times in a row, and the last of these counts.
        query_BRHC, ..., bias_BRK: as of ``gsm_kernels.attend``, or without the last three of ``attend_band``.
    """
    band = (query_BRHC, window_BEC, position_BR, width, sink_H, cos_BRP, sin_BRP)
    counts = slice(repeats - 1, None, repeats)

    def weights() -> Tensor:
        return attention_weights(*band, entry_BFC, chosen_BRK, bias_BRK)[:, counts]

    replaced_BRHE = tap(name, weights)
    if replaced_BRHE is not None:
        seen_BRKC, seen_BRK = (x[:, counts] for x in _seen(window_BEC, position_BR, width, entry_BFC, chosen_BRK))
        value_BRKC = promoted(seen_BRKC).masked_fill(~seen_BRK[..., None], 0)
        with full_precision(value_BRKC):
            mixed_BRHC = torch.einsum("brhk,brkc->brhc", replaced_BRHE[..., :-1], value_BRKC)
        return rotate(mixed_BRHC, cos_BRP[:, counts], sin_BRP[:, counts], inverse=True).type_as(query_BRHC)
    if entry_BFC is None or chosen_BRK is None:
        mixed_BRHC = attend_band(*band)
    else:
        mixed_BRHC = attend(*band, entry_BFC, chosen_BRK, bias_BRK)
    return mixed_BRHC if repeats == 1 else mixed_BRHC[:, counts]


def attention_weights(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    entry_BFC: Tensor | None = None,
    chosen_BRK: Tensor | None = None,
    bias_BRK: Tensor | None = None,
) -> Tensor:
    """Attention weights, which the kernels never write down. Arguments as of ``gsm_kernels.attend``, or without the
    last three of ``attend_band``.

    Returns:
        weights_BRHE: over the window (oldest first, ``width`` places), then the selected slots, then the sink. Rows
            sum to 1.
    """
    query_BRHC = promoted(rotate(query_BRHC, cos_BRP, sin_BRP))
    seen_BRKC, seen_BRK = _seen(window_BEC, position_BR, width, entry_BFC, chosen_BRK)
    with full_precision(query_BRHC):
        logit_BRHK = torch.einsum("brhc,brkc->brhk", query_BRHC, promoted(seen_BRKC)) * query_BRHC.shape[-1] ** -0.5
        if bias_BRK is not None and logit_BRHK.shape[-1] > width:
            logit_BRHK = logit_BRHK + pad(promoted(bias_BRK), (width, 0))[:, :, None]
        logit_BRHK = logit_BRHK.masked_fill(~seen_BRK[:, :, None], float("-inf"))
        sink_BRH1 = promoted(sink_H)[:, None].expand(*logit_BRHK.shape[:3], 1)
        return torch.cat([logit_BRHK, sink_BRH1], dim=-1).softmax(dim=-1)


def _seen(
    window_BEC: Tensor, position_BR: Tensor, width: int, entry_BFC: Tensor | None, chosen_BRK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What stands at every place of a row's weights but the sink's, [B, R, K, C], and whether the row sees it."""
    rows, stored = position_BR.shape[1], window_BEC.shape[1]
    row_R = torch.arange(stored - rows, stored, device=position_BR.device)
    back_W = torch.arange(width - 1, -1, -1, device=position_BR.device)
    index_RW = row_R[:, None] - back_W
    seen_BRKC = window_BEC[:, index_RW.clamp(min=0)]
    seen_BRK = back_W <= position_BR[..., None]
    if entry_BFC is not None and chosen_BRK is not None and entry_BFC.shape[1]:
        row_BRK = chosen_BRK.clamp(min=0)
        picked_BRKC = entry_BFC[torch.arange(len(row_BRK), device=row_BRK.device)[:, None, None], row_BRK]
        seen_BRKC, seen_BRK = torch.cat([seen_BRKC, picked_BRKC], 2), torch.cat([seen_BRK, chosen_BRK >= 0], 2)
    return seen_BRKC, seen_BRK
