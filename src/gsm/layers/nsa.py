"""NSA, native sparse attention (Yuan et al., 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable
Sparse Attention"): three kinds of attention to one cache of keys and values, weighted by gates.

    x -> keys, values --+--> compressor -> an entry for each block ---> all of them --- gate --.
                        |                       | scores                                       |
                        +--> all tokens ---> the tokens of the best blocks ------------ gate --+-> output
                        '--> the last tokens ------------------------------------------ gate --'

As in ``fla/layers/nsa.py`` of flash-linear-attention 0.6, the three share keys and values, and the same non-overlapping
blocks are compressed and selected. A block is compressed by a mean there, by an MLP over the whole block in the paper,
and here by an MLP of each token (``BlockCompressor``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.cache.memory import BankCache, BlockCache, DenseCache
from gsm.cache.slots import Slots, plan_slots
from gsm.cache.store import Column, Window
from gsm.errors import within
from gsm.layers.block import LayerOutput, MixerGeometry
from gsm.layers.costs import LayerCost, ProductCost, Store, attention, products
from gsm.layers.key_value import History, KeyValue, RangeAttention
from gsm.layers.linear import Linear
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles, Rope
from gsm.shapes import last_rows, promoted
from gsm.span import Span
from gsm_kernels import rotate
from gsm_kernels.device import full_precision, scratch_elements
from gsm_kernels.rows import slices
from gsm_kernels.slots import flat_slots, visible

BRANCHES = ("compressed", "selected", "window")
ALWAYS = 3  # blocks selected regardless of scores: the first one, the row's own, and the one before it


class NSA(RangeAttention):
    """Gated attention to compressed blocks, to the tokens of selected blocks, and to a window.

    Args:
        shape: widths that all attention layers share.
        geometry: gives the rotary embedding, and the defaults of window and blocks.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        block: tokens per block (m).
        blocks: number of blocks that a row selects (n), including its own, the previous one and the first of its
            document; None: these three, and as many others as hold the geometry's ``top_k`` tokens.
        window: tokens in the window (W); None: the geometry's.
        key_value_heads: key and value heads (G); None: the default of ``KeyValue``.

    Raises:
        ValueError: if ``block`` is not in [2, 65536], ``blocks`` not in [3, 65536], or ``window`` below 1.
    """

    reach = None

    def __init__(
        self,
        shape: Shape,
        *,
        geometry: MixerGeometry,
        name: str,
        block: int,
        blocks: int | None,
        window: int | None,
        key_value_heads: int | None,
    ):
        super().__init__(shape, rope=geometry.bank_rope(), name=name)
        within(2, 65536, block=block)
        self.block, self.blocks = block, ALWAYS - (-geometry.top_k // block) if blocks is None else blocks
        within(ALWAYS, 65536, blocks=self.blocks)
        self.window = geometry.window if window is None else window
        if self.window < 1:
            raise ValueError(f"window must be at least 1, or null for the size's window, got {window}")
        self.key_value = KeyValue(shape, key_value_heads)
        self.compressor = BlockCompressor(shape.entry_dim, block, self.rope)
        self.gate = Linear(shape.dim, len(BRANCHES) * shape.heads)

    def start(self, batch: int, kind: str) -> BlockCache:
        """Return an empty cache; ``kind`` (``decoder``) labels its bytes.

        The window also holds the tokens of an unfinished block.
        """
        entry_BU = self.key_value.entry(batch)
        recent = Window.empty(f"{kind}_window", max(self.window, self.block - 1), entry_BU)
        none_B = torch.zeros(batch, dtype=torch.int64, device=entry_BU.device)
        blocks = BankCache(recent, Column.empty(f"{kind}_blocks", self.block, entry_BU), None, none_B)
        return BlockCache(DenseCache.empty(f"{kind}_cache", entry_BU), blocks)

    def forward(self, x_BTD: Tensor, span: Span, cache: BlockCache, below: object) -> tuple[Tensor, LayerOutput]:
        """Write keys and values of all T new positions; attend for the last R of them."""
        angles = self.rope.at(span, x_BTD.dtype)
        entry_BTU = self.key_value(x_BTD, angles)
        seen_BFU, slots, tokens = cache.tokens.extend(entry_BTU, span)
        recent_BEU, recent = cache.blocks.pending.extend(entry_BTU)
        compressed, blocks = self.compress(recent_BEU, span, replace(cache.blocks, pending=recent))
        x_BRD = last_rows(x_BTD, span.rows)
        query_BRHC = rotate(self.ask(x_BRD)[0], *angles.last_rows(span.rows))
        chosen_BRGN = choose_blocks(query_BRHC, compressed, span.row_position_BR, self.block, self.blocks)
        history = self.key_value.history(seen_BFU, slots, span)
        selected = replace(history, chosen_BRGN=chosen_BRGN, block=self.block)
        window = self.key_value.recent(recent_BEU, self.window, span)
        gates = self.gate(x_BRD).sigmoid().unflatten(-1, (len(BRANCHES), -1, 1)).unbind(2)
        out = [
            gate_BRH1 * self.attend(query_BRHC, seen, f"{branch}/")
            for branch, seen, gate_BRH1 in zip(BRANCHES, (compressed, selected, window), gates, strict=True)
        ]
        return self.project(out[0] + out[1] + out[2]), LayerOutput(BlockCache(tokens, blocks))

    def compress(self, recent_BEU: Tensor, span: Span, cache: BankCache) -> tuple[History, BankCache]:
        """Return the compressed blocks, including those that this call finishes, with the range that each row sees."""
        count_B, new = cache.count_B, span.position_BT.shape[1]
        slots = span.once(("slots", self.block), lambda: plan_slots(span.position_BT, self.block, count_B))
        heads = self.key_value.heads
        block_BFU, entry = cache.entry.place(self.compressor(recent_BEU, slots, new, heads), slots)
        key_BFGC, value_BFGC = self.key_value.split(block_BFU)
        history = History(key_BFGC, value_BFGC, slots.first_BT, slots.last_BT).last_rows(span.rows)
        return history, BankCache(cache.pending, entry, None, None if count_B is None else slots.after_B)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of the layer. The attention to compressed blocks also yields the scores that select
        blocks."""
        inner, width = self.query.width, self.key_value.projection.out_features
        compressed = attention(inner, width, None, ratio=self.block)
        selected = attention(inner, width, self.blocks * self.block, block=self.block)
        near = attention(inner, width, self.window, nearest=True)
        rows = products(self.query, self.output, self.gate)
        stores = (
            Store(f"{kind}_window", width, max(self.window, self.block - 1)),
            Store(f"{kind}_blocks", width, ratio=self.block, counted=True),
        )
        return self.key_value.work(f"{kind}_cache") + LayerCost(
            {"projections": rows, "attention": ProductCost(moved=2 * len(BRANCHES) * inner)},
            per_slot={"compressors": self.compressor.work(self.key_value.heads)},
            looks=(compressed, selected, near),
            stores=stores,
            bank=compressed,
        )


class BlockCompressor(nn.Module):
    """Compress every m tokens of a document to one key, ``W_2 sum_i silu(W_1 k_i + p_i) / sqrt(m)``, with a vector p_i
    for each place in a block, and to one value, with a second such map. All heads share the maps.

    The given keys are rotated. Their rotation is undone first, and the compressed key is rotated by the position of the
    block's first token.

    Args:
        width: channels of a head (C).
        block: tokens per block (m).
        rope: rotary embedding of the keys.
    """

    def __init__(self, width: int, block: int, rope: Rope):
        super().__init__()
        self.block, self.rope = block, rope
        self.place = nn.Parameter(torch.zeros(block, 2, width))
        self.key_in, self.key_out = Linear(width, width), Linear(width, width)
        self.value_in, self.value_out = Linear(width, width), Linear(width, width)

    def forward(self, recent_BEU: Tensor, slots: Slots, new: int, heads: int) -> Tensor:
        """Return the entries of the blocks that finish in this call, ``block_BGU``; zeros for unused slots.

        Args:
            recent_BEU: keys and values of stored and new tokens, in their order.
            slots: the slots of the blocks that finish.
            new: number of new tokens.
            heads: key and value heads.
        """
        stored, place_M = recent_BEU.shape[1] - new, torch.arange(self.block, device=recent_BEU.device)
        member_BGM = (slots.end_BG + stored - (self.block - 1))[..., None] + place_M
        shape = (*member_BGM.shape, 2, heads, recent_BEU.shape[2] // (2 * heads))
        flat = flat_slots(member_BGM.clamp(max=recent_BEU.shape[1] - 1), recent_BEU.shape[1])
        member_BGM2HC = recent_BEU.flatten(0, 1).index_select(0, flat).view(shape)
        turns = self.rope(slots.position_BG[..., None] + place_M, recent_BEU.dtype)
        key_BGMHC, value_BGMHC = member_BGM2HC.unbind(3)
        key_BGMHC = rotate(key_BGMHC.flatten(1, 2), *(x.flatten(1, 2) for x in turns), inverse=True).view_as(key_BGMHC)
        key_BGHC = self.pooled(key_BGMHC, self.key_in, self.key_out, self.place[:, 0])
        value_BGHC = self.pooled(value_BGMHC, self.value_in, self.value_out, self.place[:, 1])
        first = Angles(turns.cos_BTP[:, :, 0], turns.sin_BTP[:, :, 0])
        block_BGU = torch.cat([rotate(key_BGHC, *first).flatten(2), value_BGHC.flatten(2)], dim=-1)
        return block_BGU.masked_fill(slots.end_BG[..., None] < 0, 0)

    def pooled(self, x_BGMHC: Tensor, enter: Linear, leave: Linear, place_MC: Tensor) -> Tensor:
        """Compress the keys or the values of blocks."""
        hidden_BGMHC = F.silu(enter(x_BGMHC) + place_MC[:, None])
        return leave(hidden_BGMHC.sum(2) * self.block**-0.5)

    def work(self, heads: int) -> ProductCost:
        """Return the cost per block: the maps of the keys and values of all its tokens and heads."""
        enter, leave = products(self.key_in, self.value_in), products(self.key_out, self.value_out)
        times = heads * self.block
        products_of_all = times * enter.multiply_adds + heads * leave.multiply_adds
        weights = enter.weights + leave.weights + self.place.numel()
        return ProductCost(products_of_all, times * enter.moved + heads * leave.moved, weights)


@torch.no_grad()
def choose_blocks(query_BRHC: Tensor, blocks: History, position_BR: Tensor, block: int, count: int) -> Tensor:
    """Select the blocks of tokens that each row attends to, for each group of heads.

    These are the first block of its document, its own block, the previous one, and the blocks whose compressed entries
    have the largest attention weights, summed over the heads of the group.

    Args:
        query_BRHC: rotated queries.
        blocks: the compressed blocks; a row sees only finished ones.
        position_BR: int64, positions of the rows in their documents, -1 for padding.
        block: tokens per block.
        count: number of blocks that a row selects (n), at least 3.

    Returns:
        chosen_BRGN, int64: numbers of blocks, counted from 0 at the start of the document, -1 for none. N is n, or less
        if there are fewer slots.
    """
    rows, slots = query_BRHC.shape[1], blocks.key_BFGC.shape[1]
    own_BR = position_BR.div(block, rounding_mode="floor")
    own_BRG1 = own_BR[..., None, None].expand(-1, -1, blocks.key_BFGC.shape[2], -1)
    if not rows or not slots:
        return own_BRG1
    size = max(1, scratch_elements(query_BRHC.device) // (len(query_BRHC) * query_BRHC.shape[2] * slots))
    best = [_best(query_BRHC, blocks, own_BR, part, count - 1) for part in slices(rows, size)]
    return torch.cat((own_BRG1, torch.cat(best, dim=1)), dim=-1)


def _best(query_BRHC: Tensor, blocks: History, own_BR: Tensor, rows: slice, count: int) -> Tensor:
    """Return the best finished blocks, except their own, for the rows of a slice."""
    first_BR, last_BR, own_BR = blocks.first_BR[:, rows], blocks.last_BR[:, rows], own_BR[:, rows]
    slots, groups = blocks.key_BFGC.shape[1:3]
    hidden_BRF = ~visible(slots, first_BR, last_BR)
    query_BRGYC = promoted(query_BRHC[:, rows]).unflatten(2, (groups, -1)) * query_BRHC.shape[-1] ** -0.5
    with full_precision(query_BRGYC):
        logit_BRGYF = torch.einsum("brgyc,bfgc->brgyf", query_BRGYC, promoted(blocks.key_BFGC))
    weight_BRGYF = logit_BRGYF.masked_fill(hidden_BRF[:, :, None, None], torch.finfo(logit_BRGYF.dtype).min).softmax(-1)
    number_BRF = torch.arange(slots, device=first_BR.device) - first_BR[..., None]
    always_BRF = (number_BRF == 0) | (number_BRF == own_BR[..., None] - 1)
    never_BRF = hidden_BRF | (number_BRF == own_BR[..., None])
    score_BRGF = weight_BRGYF.sum(3).masked_fill(always_BRF[:, :, None], torch.inf)
    score_BRGF = score_BRGF.masked_fill(never_BRF[:, :, None], -torch.inf)
    score_BRGN, slot_BRGN = score_BRGF.topk(min(count, slots), dim=-1)
    return torch.where(score_BRGN == -torch.inf, -1, slot_BRGN - first_BR[..., None, None])
