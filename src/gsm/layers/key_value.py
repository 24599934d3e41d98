"""Attention with separate keys and values to a contiguous range of slots: the common parts of dense, windowed and
shared attention. Query and output projections are the same as in all other models.

G key and value heads, each for H / G query heads; U = 2 G C, the width of an entry: keys and values, concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gsm.cache.slots import Slots
from gsm.layers.attend_blocks import attend_blocks
from gsm.layers.costs import LayerCost, ProductCost, Store, attention, products
from gsm.layers.linear import Linear
from gsm.layers.multi_head import MultiHead
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles, Rope
from gsm.observe import tap
from gsm.shapes import last_rows, promoted
from gsm.span import Span
from gsm_kernels import attend_range, rotate
from gsm_kernels.device import full_precision
from gsm_kernels.slots import visible, visible_blocks


@dataclass(frozen=True)
class History:
    """Keys and values, and the range of slots that each row sees.

    Attributes:
        key_BFGC, value_BFGC: rotated keys, and values, of G heads in F slots.
        first_BR, last_BR: int64, the slots [first, last) that each row sees.
        width: largest number of slots in a range, if the last slots are those of the rows (None: no limit).
        whole: whether each row sees every slot up to its own, or with ``width`` the last ``width`` of them.
        chosen_BRGN: int64, the blocks of the range that each row sees (None: the whole range).
        block: slots per block.

    The host knows ``width`` and ``whole``, so kernels can be chosen by them; see ``gsm_kernels.attend_range``.
    """

    key_BFGC: Tensor
    value_BFGC: Tensor
    first_BR: Tensor
    last_BR: Tensor
    width: int | None = None
    whole: bool = False
    chosen_BRGN: Tensor | None = None
    block: int = 1

    def last_rows(self, rows: int) -> History:
        """Return the history for the last ``rows`` rows."""
        chosen_BRGN = None if self.chosen_BRGN is None else last_rows(self.chosen_BRGN, rows)
        first_BR, last_BR = last_rows(self.first_BR, rows), last_rows(self.last_BR, rows)
        return replace(self, first_BR=first_BR, last_BR=last_BR, chosen_BRGN=chosen_BRGN)


class UnfitHeads(ValueError):
    """The number of key and value heads of a mixer does not divide its number of query heads."""


class KeyValue(nn.Module):
    """The projection of a token to its keys and values, with rotated keys.

    They are stored together as one entry of width U, so that a memory needs one store and one copy.

    Args:
        shape: widths that all attention layers share.
        heads: key and value heads (G); None: ``default_heads`` of the query heads.

    Raises:
        UnfitHeads: a ValueError, if ``heads`` does not divide the number of query heads.
    """

    def __init__(self, shape: Shape, heads: int | None = None):
        super().__init__()
        self.heads = default_heads(shape.heads) if heads is None else heads
        if self.heads < 1 or shape.heads % self.heads:
            raise UnfitHeads(
                f"key_value_heads must divide the number of query heads ({shape.heads}), got {self.heads}; null: one "
                "for every four query heads"
            )
        self.projection = Linear(shape.dim, 2 * self.heads * shape.entry_dim)

    def forward(self, x_BTD: Tensor, angles: Angles, projected_BTU: Tensor | None = None) -> Tensor:
        """Return ``entry_BTU``; ``projected_BTU`` is ``projection(x_BTD)`` if the caller has computed it."""
        key_BTGC, value_BTGC = self.split(self.projection(x_BTD) if projected_BTU is None else projected_BTU)
        return torch.cat([rotate(key_BTGC, *angles).flatten(2), value_BTGC.flatten(2)], dim=-1)

    def entry(self, batch: int) -> Tensor:
        """Return an uninitialised entry of ``batch`` sequences, [B, U], in the model's dtype and on its device."""
        return self.projection.weight.new_empty(batch, self.projection.out_features)

    def history(self, seen_BFU: Tensor, slots: Slots, span: Span) -> History:
        """Return the entries of a cache as a ``History``, in which a row sees its document up to its own position."""
        whole = span.single_document or span.filled is not None
        key_BFGC, value_BFGC = self.split(seen_BFU if span.filled is None else seen_BFU[:, : span.filled])
        history = History(key_BFGC, value_BFGC, slots.first_BT, slots.last_BT, whole=whole)
        return history.last_rows(span.rows)

    def recent(self, seen_BEU: Tensor, width: int, span: Span) -> History:
        """Return the entries of a window, in the order of their tokens, as a ``History``. Each requested row sees the
        last ``width`` entries of its document."""
        stored, position_BR = seen_BEU.shape[1], span.row_position_BR
        place_R = torch.arange(stored - span.rows, stored, device=position_BR.device)
        last_BR = (place_R + 1).expand_as(position_BR)
        first_BR = last_BR - (position_BR.clamp(max=width - 1) + 1)  # empty for padding, whose position is -1
        key_BEGC, value_BEGC = self.split(seen_BEU)
        return History(key_BEGC, value_BEGC, first_BR, last_BR, width, span.single_document)

    def split(self, seen_BFU: Tensor) -> tuple[Tensor, Tensor]:
        """Split entries into keys and values, [B, F, G, C] each."""
        key_BFGC, value_BFGC = seen_BFU.unflatten(-1, (2, self.heads, -1)).unbind(2)
        return key_BFGC, value_BFGC

    def work(self, kind: str, size: int | None = None) -> LayerCost:
        """Return the cost of the projection for each token, and of a store ``kind`` with the last ``size`` entries
        (None: all)."""
        store = Store(kind, self.projection.out_features, size, counted=size is None)
        return LayerCost(per_token={"keys and values": products(self)}, stores=(store,))


class RangeAttention(MultiHead):
    """Attention to a ``History``.

    Args:
        shape: widths that all attention layers share.
        rope: rotary embedding of the queries, equal to that of the keys.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
    """

    def __init__(self, shape: Shape, *, rope: Rope, name: str):
        super().__init__(shape.dim, shape, rope=rope, name=name)

    def read(self, x_BRD: Tensor, history: History, angles: Angles, down_BRQ: Tensor | None = None) -> Tensor:
        """Return the output of the attention to a history, [B, R, D]; ``down_BRQ`` as in ``Query``."""
        query_BRHC, _ = self.ask(x_BRD, down_BRQ)
        return self.project(self.attend(rotate(query_BRHC, *angles), history))

    def attend(self, query_BRHC: Tensor, history: History, branch: str = "") -> Tensor:
        """Return the weighted sum of values for rotated queries, [B, R, H, C]; ``branch`` precedes the names of the
        taps."""
        key_BFGC = tap((self, branch + "key"), history.key_BFGC)
        value_BFGC = tap((self, branch + "value"), history.value_BFGC)
        if key_BFGC is not history.key_BFGC or value_BFGC is not history.value_BFGC:
            history = replace(history, key_BFGC=key_BFGC, value_BFGC=value_BFGC)
        replaced_BRHF = tap((self, branch + "weights"), lambda: range_weights(query_BRHC, history))
        if replaced_BRHF is not None:
            return range_mixture(replaced_BRHF, history).type_as(query_BRHC)
        entries, ranges = (history.key_BFGC, history.value_BFGC), (history.first_BR, history.last_BR)
        if history.chosen_BRGN is None:
            return attend_range(query_BRHC, *entries, *ranges, history.width, history.whole)
        return attend_blocks(query_BRHC, *entries, *ranges, history.chosen_BRGN, history.block)

    def read_cost(self, width: int, limit: int | None = None) -> LayerCost:
        """Return the cost of attention to entries of width ``width``: to all, or to the nearest ``limit`` entries."""
        inner = self.query.width
        per_row = {"projections": products(self.query, self.output), "attention": ProductCost(moved=2 * inner)}
        return LayerCost(per_row, looks=(attention(inner, width, limit, nearest=True),))


def default_heads(heads: int) -> int:
    """Return the largest number of key heads that divides ``heads`` and has at least four query heads each; 1 for fewer
    than four query heads."""
    return next(count for count in range(max(1, heads // 4), 0, -1) if heads % count == 0)


def range_weights(query_BRHC: Tensor, history: History) -> Tensor:
    """Return the attention weights [B, R, H, F], which the kernels never materialise.

    They sum to 1 over slots, or to 0 for a row that sees no slot.
    """
    query_BRGYC = promoted(query_BRHC).unflatten(2, (history.key_BFGC.shape[2], -1))
    with full_precision(query_BRGYC):
        logit_BRGYF = torch.einsum("brgyc,bfgc->brgyf", query_BRGYC, promoted(history.key_BFGC))
        logit_BRHF = logit_BRGYF.flatten(2, 3) * query_BRHC.shape[-1] ** -0.5
        hidden = _hidden(history, query_BRHC.shape[2])
        lowest = torch.finfo(logit_BRHF.dtype).min  # with -inf, a row that sees no slot would have a gradient of NaN
        return logit_BRHF.masked_fill(hidden, lowest).softmax(dim=-1).masked_fill(hidden, 0)


def range_mixture(weight_BRHF: Tensor, history: History) -> Tensor:
    """Return the sum of values with these weights, [B, R, H, C]; weights of invisible slots are ignored."""
    seen_BRHF = weight_BRHF.masked_fill(_hidden(history, weight_BRHF.shape[2]), 0)
    weight_BRGYF = seen_BRHF.unflatten(2, (history.value_BFGC.shape[2], -1))
    with full_precision(weight_BRHF):
        return torch.einsum("brgyf,bfgc->brgyc", weight_BRGYF, promoted(history.value_BFGC)).flatten(2, 3)


def _hidden(history: History, heads: int) -> Tensor:
    """Return a mask of the slots that a row does not see, bool [B, R, 1, F], or [B, R, H, F] with chosen blocks."""
    slots, groups = history.key_BFGC.shape[1:3]
    if history.chosen_BRGN is None:
        return ~visible(slots, history.first_BR, history.last_BR)[:, :, None]
    seen_BRGF = visible_blocks(slots, history.first_BR, history.last_BR, history.chosen_BRGN, history.block)
    return ~seen_BRGF.repeat_interleave(heads // groups, dim=2)
