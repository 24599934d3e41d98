"""Sparse attention of DeepSeek-V4.1 (CSA2): attention to a window of recent tokens, and to a few selected entries of a
bank, the memory of distant tokens that a group of layers shares.

    x -> window entries ----------------------------------------------.
    x -> compressor -> bank entries, index keys   (Full)               |
    x -> query -> indexer -> Top-K of the bank    (Full, Reindex)      |
    x -> query -> one softmax over window and selected entries, sink <-'-> output

One class has four roles: ``window`` reads only its window; ``full`` builds a bank and selects from it; ``reindex``
makes its own selection from the bank of the last Full layer; ``reuse`` reads the selection of the last Full or Reindex
layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from gsm.cache.memory import BankCache, LayerCache
from gsm.cache.slots import plan_slots
from gsm.cache.store import Window
from gsm.layers.attended import Attended, Bank
from gsm.layers.block import LayerOutput
from gsm.layers.costs import POOL_BLOCK, LayerCost, Store, check_pool, products
from gsm.layers.indexer_training import IndexerTraining
from gsm.layers.latent_attention import LatentAttention
from gsm.layers.linear import Linear, together
from gsm.layers.projections import Compressor, Entry, Indexer, Shape
from gsm.layers.rope import Angles, Rope
from gsm.layers.search import Selection, search_bank
from gsm.observe import tap
from gsm.shapes import last_rows, read_by_several
from gsm.span import Span
from gsm_kernels import candidate_pool, rotate

Role = Literal["window", "full", "reindex", "reuse"]


class SparseAttention(LatentAttention):
    """One sparse-attention layer.

    Args:
        shape: widths that all attention layers share.
        role: ``window``, ``full``, ``reindex`` or ``reuse``, see above.
        window: number of window entries that a row sees, including its own (W).
        top_k: number of bank entries that a row selects (K).
        ratio: tokens per bank entry (m), for a Full layer.
        rope: rotary embedding of queries, entries and index keys.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        reads_bank: whether this layer attends to a bank. If false, a Full layer still builds one, for the aggregation
            stages, and has no indexer.
        pool_blocks: number of candidate blocks that a Full layer selects for each row; later Reindex layers search only
            these (None: no pool).
        indexer_training: trains its indexer.
    """

    def __init__(
        self,
        shape: Shape,
        role: Role,
        *,
        window: int,
        top_k: int,
        ratio: int,
        rope: Rope,
        name: str,
        reads_bank: bool = True,
        pool_blocks: int | None = None,
        indexer_training: IndexerTraining | None = None,
    ):
        super().__init__(shape.dim, shape, window=window, rope=rope, name=name, indexer_training=indexer_training)
        self.role, self.top_k, self.ratio, self.pool_blocks = role, top_k, ratio, pool_blocks
        self.window = Entry(shape)
        self.compressor = Compressor(shape, ratio) if role == "full" else None
        indexes = reads_bank and role in ("full", "reindex")
        self.indexer = Indexer(shape.query_rank, shape.dim, shape, owns_keys=role == "full") if indexes else None

    @property
    def reach(self) -> int | None:
        """Number of earlier positions of its input that a row needs: W - 1, or None (all) if it builds a bank."""
        return None if self.role == "full" else self.window_size - 1

    @property
    def one_input(self) -> tuple[Linear, Linear]:
        """The maps of the same input, for ``gsm.layers.linear.side_by_side``."""
        return self.window.projection, self.query.down

    def start(self, batch: int, kind: str) -> LayerCache:
        """Return an empty cache; ``kind`` (``encoder`` or ``decoder``) labels its bytes."""
        like = self.window.projection.weight
        entry_BC = like.new_empty(batch, like.shape[0])
        window = Window.empty(f"{kind}_window", self.window_size, entry_BC)
        if self.compressor is None:
            return LayerCache(window)
        pending_BC = entry_BC.repeat(1, 1 if self.ratio == 1 else 2)
        key_BI = None if self.indexer is None else like.new_empty(batch, self.indexer.width)
        return LayerCache(window, BankCache.empty(f"{kind}_bank", self.ratio, pending_BC, entry_BC, key_BI))

    def forward(
        self, x_BTD: Tensor, span: Span, cache: LayerCache, below: Attended | None
    ) -> tuple[Tensor, LayerOutput]:
        """Write entries for all T new positions, and attend for the last R of them.

        Args:
            x_BTD: normed input.
            span: the new positions, with the number of requested rows.
            cache: the cache of this layer.
            below: entries that the layer below attended to (None on the first layer).
        """
        angles = self.rope.at(span, x_BTD.dtype)
        all_rows = span.rows == x_BTD.shape[1]
        entry_BTC, down_BRQ = together(x_BTD, *self.one_input) if all_rows else (None, None)
        window_BEC, window_store = cache.window.extend(self.window(x_BTD, angles, entry_BTC))
        window_BEC = tap((self, "window"), window_BEC)
        bank, bank_cache = self.publish(x_BTD, span, cache.bank)
        x_BRD, position_BR, angles = last_rows(x_BTD, span.rows), span.row_position_BR, angles.last_rows(span.rows)
        query_BRHC, latent_BRQ = self.ask(x_BRD, down_BRQ)
        attended = self.look(window_BEC, bank, below, span.rows)
        selection = self.select(latent_BRQ, x_BRD, angles, attended).tapped((self, "top_k"), attended.bank)
        attended = self.choose(attended, selection)
        indexer_loss = self.indexer_loss(query_BRHC, selection, attended, span, angles)
        update_BRD = self.read(query_BRHC, attended, position_BR, angles)
        cache = LayerCache(window_store, bank_cache)
        return update_BRD, LayerOutput(cache, self.add_pool(attended, selection), indexer_loss)

    def publish(self, x_BTD: Tensor, span: Span, cache: BankCache | None) -> tuple[Bank | None, BankCache | None]:
        """Return the bank of a Full layer, with the entries that this call finishes, and its cache; (None, None) for
        other roles."""
        if self.compressor is None or cache is None:
            return None, None
        projected_BEC, pending = cache.pending.extend(self.compressor.project(x_BTD))
        # All banks of one ratio are equally full, so they share the slots and the angles of new entries.
        slots = span.once(("slots", self.ratio), lambda: plan_slots(span.position_BT, self.ratio, cache.count_B))
        stored = projected_BEC.shape[1] - x_BTD.shape[1]
        end_BG = span.once(("ends", self.ratio, stored), lambda: slots.ends(stored))
        latent_BGC = tap((self, "latent"), self.compressor.pool(projected_BEC, end_BG))
        name = ("bank angles", self.ratio, *self.rope.key, x_BTD.dtype)
        angles = span.once(name, lambda: self.rope(slots.position_BG, x_BTD.dtype))
        entry_BFC, entry_store = cache.entry.place(rotate(latent_BGC, *angles), slots)
        key_BFI, key_store = None, None
        if self.indexer is not None and cache.key is not None:
            key_BFI, key_store = cache.key.place(self.indexer.keys(latent_BGC, angles), slots)
        entry_BFC = read_by_several(tap((self, "bank"), entry_BFC))
        bank = Bank(entry_BFC, key_BFI, slots.first_BT, slots.last_BT, latent_BGC, slots, angles)
        count_B = None if cache.count_B is None else slots.after_B
        return bank, BankCache(pending, entry_store, key_store, count_B)

    def look(self, window_BEC: Tensor, bank: Bank | None, below: Attended | None, rows: int) -> Attended:
        """Return the entries that the rows see: the window, and the bank of the layer's group."""
        if bank is not None:
            return Attended(window_BEC, bank.last_rows(rows))
        if self.role == "window" or below is None:
            return Attended(window_BEC)
        return replace(below.last_rows(rows), window_BEC=window_BEC)

    def select(self, latent_BRQ: Tensor, x_BRD: Tensor, angles: Angles, attended: Attended) -> Selection:
        """Select bank slots for the rows; a Reuse layer returns the selection of the layer below."""
        if self.indexer is None or attended.bank is None or attended.bank.key_BFI is None:
            return Selection.by_layer(attended)
        index = self.indexer(latent_BRQ, x_BRD, angles)
        return search_bank(index, attended.bank, attended.bank.key_BFI, self.top_k, attended.pool_BRN)

    def add_pool(self, attended: Attended, selection: Selection) -> Attended:
        """Return ``attended`` with the candidate pool to which the search of later Reindex layers is limited.

        There is no pool if it would hold the whole bank. This layer searches the whole bank.
        """
        bank = attended.bank
        if self.pool_blocks is None or selection.index is None or selection.key_BFI is None or bank is None:
            return attended
        if selection.key_BFI.shape[1] <= POOL_BLOCK * self.pool_blocks:
            return attended
        pool_BRN = candidate_pool(*selection.index, selection.key_BFI, bank.first_BR, bank.last_BR, self.pool_blocks)
        return replace(attended, pool_BRN=pool_BRN)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of the layer. If it reads a bank that it does not build, this is the bank of ``below``."""
        near = self.look_cost(self.window_size, nearest=True)
        window = Store(f"{kind}_window", near.width, self.window_size)
        per_row = self.cost_of_rows(self.window, self.compressor, self.indexer)
        per_token = {"entries": products(self.window)}
        total = LayerCost(per_row, per_token, looks=(near,), stores=(window,), window=near)
        if self.role == "full":
            total += self.bank_cost(f"{kind}_bank", near.width)
            bank, pool = self.look_cost(self.top_k if self.indexer else 0, ratio=self.ratio), None
        elif self.role == "window" or below is None or below.bank is None:
            return total
        else:
            bank, pool = below.bank, below.pool
        total += LayerCost(looks=(bank,), bank=bank, pool=pool)
        if self.indexer is not None:
            total += self.indexer.work(self.ratio, pool)
        if self.pool_blocks:
            check_pool(POOL_BLOCK * self.pool_blocks, self.top_k)
            total += LayerCost(pool=POOL_BLOCK * self.pool_blocks)
        return total

    def bank_cost(self, kind: str, width: int) -> LayerCost:
        """Return the cost of compressing tokens and storing a bank with entries of width ``width``."""
        values = 1 if self.ratio == 1 else 2  # per token of an unfinished group: its value, and its gate if any
        pending = Store(f"{kind}_pending", values * width, self.ratio - 1, carried=True)
        stores = [pending, Store(kind, width, ratio=self.ratio, counted=True)]
        if self.indexer is not None:
            stores.append(Store("index_keys", self.indexer.width, ratio=self.ratio))
        return LayerCost(per_token={"compressors": products(self.compressor)}, stores=tuple(stores))
