"""The common part of all latent attention: a query, a sink, an output projection, and attention to the visible entries.

An entry is a vector that is both key and value of all heads. The sink is a learned logit of each head in the softmax,
without a value. Encoder layers, the baseline's decoder layers, aggregation stages and GSM's decoder layers differ only
in where their entries come from.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gsm.layers.attended import Attended
from gsm.layers.costs import AttentionCost, ProductCost, attention, products
from gsm.layers.indexer_training import KL, IndexerTraining
from gsm.layers.multi_head import MultiHead
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles, Rope
from gsm.layers.search import Selection
from gsm.observe import Name, tap
from gsm.shapes import promoted
from gsm.span import Span
from gsm_kernels import IndexerLoss, attend, attend_band, rotate
from gsm_kernels.device import full_precision


class LatentAttention(MultiHead):
    """Query, sink and output projection of one attention (the paper's Query, Attn and Output).

    Args:
        dim_in: width of the query's input.
        shape: widths that all attention layers share.
        window: number of window entries that a row sees, including its own (W).
        rope: rotary embedding of queries and outputs, equal to that of the entries.
        name: prefix of the names of its taps, e.g. ``encoder/3``.
        indexer_training: trains the indexer that selects entries for it; None: the default, ``KL``.
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
        super().__init__(dim_in, shape, rope=rope, name=name)
        self.window_size = window
        self.indexer_training = indexer_training or KL()
        self.sink = nn.Parameter(torch.zeros(shape.heads))

    def read(self, query_BRHC: Tensor, attended: Attended, position_BR: Tensor, angles: Angles) -> Tensor:
        """Attend with one softmax over the window, the selected slots and the sink; return the projected output, [B, R,
        D]."""
        entry_BFC = None if attended.bank is None else attended.bank.entry_BFC
        selected = (entry_BFC, attended.chosen_BRK, attended.bias_BRK)
        return self.project(self.mix_entries(query_BRHC, attended.window_BEC, position_BR, angles, *selected))

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
        """Attend with one softmax over the window, the selected entries, if any, and the sink.

        Args:
            query_BRHC, window_BEC, position_BR, entry_BFC, chosen_BRK, bias_BRK: as in ``gsm_kernels.attend``.
            angles: rotation of the rows.
            repeats: number of consecutive copies of each row; the output of the last copy is used.
            tap_name: name of the weights' tap, after the prefix of this layer.

        Returns:
            The weighted sums of entries, [B, R, H, C].
        """
        band = (query_BRHC, window_BEC, position_BR, self.window_size, self.sink, angles.cos_BTP, angles.sin_BTP)
        return attend_tapped((self, tap_name), *band, entry_BFC, chosen_BRK, bias_BRK, repeats=repeats)

    def choose(self, attended: Attended, selection: Selection) -> Attended:
        """Return ``attended`` with the selection and, in training, the bias that trains the indexer."""
        if self._trains_indexer(selection):
            selection = selection._replace(bias_BRK=self.indexer_training.bias(selection))
        return replace(attended, chosen_BRK=selection.chosen_BRK, bias_BRK=selection.bias_BRK)

    def indexer_loss(
        self, query_BRHC: Tensor, selection: Selection, attended: Attended, span: Span, angles: Angles
    ) -> IndexerLoss | None:
        """Return the loss of the indexer that searched for the rows of this attention; None outside of training."""
        if not self._trains_indexer(selection):
            return None
        call = (query_BRHC, attended, span.row_position_BR, self.window_size, self.sink, angles)
        return self.indexer_training.loss(selection, *call, tokens=span.tokens)

    def cost_of_rows(self, *others: nn.Module | None) -> dict[str, ProductCost]:
        """Return the cost per row of the products with all parameters, except those of ``others``, which are counted
        elsewhere. Attention to entries is not included."""
        parts = [part for part in self.children() if part not in others]
        read_and_written = ProductCost(moved=2 * self.query.width)
        return {"projections": products(*parts, *self.parameters(recurse=False)), "attention": read_and_written}

    def look_cost(self, limit: int, **options) -> AttentionCost:
        """Return the cost of attention to at most ``limit`` entries per row; options as in ``AttentionCost``."""
        return attention(self.query.width, self.query.width // self.query.heads, limit, **options)

    def _trains_indexer(self, selection: Selection) -> bool:
        """Return whether an indexer searched in this call and can be trained."""
        searched = selection.index is not None and selection.chosen_BRK is not None
        return searched and self.training and torch.is_grad_enabled()


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
    """Attend, with a tap on the attention weights; return the weighted sums of entries, [B, R, H, C].

    The kernels never materialise the weights. They are computed only if the tap is recorded or patched; if patched, the
    output is computed from the patch.

    Args:
        name: name of the tap.
        repeats: number of consecutive copies of each row; the output of the last copy is used.
        query_BRHC, ..., bias_BRK: as in ``gsm_kernels.attend``, or without the last three as in ``attend_band``.
    """
    width = min(width, window_BEC.shape[1])  # weights of places without an entry, as in a large state, waste memory
    band = (query_BRHC, window_BEC, position_BR, width, sink_H, cos_BRP, sin_BRP)
    counts = slice(repeats - 1, None, repeats)
    replaced_BRHE = tap(name, lambda: _weights(*band, entry_BFC, chosen_BRK, bias_BRK)[:, counts])
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


def _weights(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    entry_BFC: Tensor | None,
    chosen_BRK: Tensor | None,
    bias_BRK: Tensor | None,
) -> Tensor:
    """Return the attention weights, [B, R, H, E]: over the window (oldest first, ``width`` places), then the selected
    slots, then the sink. Rows sum to 1."""
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
    """Return the entry that belongs to each weight of a row except the sink's, [B, R, K, C], and whether the row sees
    it, [B, R, K]."""
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
