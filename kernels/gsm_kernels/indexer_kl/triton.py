"""The indexer's loss without a tensor of rows x slots x heads: one mass and one score of each pair, in chunks of rows.

Teacher, dense: a first kernel finds what every head's softmax divides by (window, visible slots and sink, as flash
attention does, without values); a second computes each tile of logits once more and adds the heads' probabilities up in
registers. They are matrix products of H C (F + W) and H C F multiplications a row. The indexer's scores come from the
first kernel of `index_top_k`. Sparse: one program has a row with all its heads and gathers the selected entries; the
scores are those of `score_slots`.

A row's divergence and the gradient of its scores, which takes the scores' place, are then two passes over its line in
the second-level cache. The indexer's gradients follow at once: dense, one kernel for queries and weights by tiles of
rows and one for keys by tiles of slots, whose parts over rows are added in a fixed order; sparse, those of
`score_slots`. No atomic additions: the same bits in every run. A chunk's buffers are 48 MiB at most.

Derived for 16,384 tokens, H = 32, C = 128, F = 2,048, half of it visible: 2 x 0.14 TFLOP of teacher and 0.08 of
indexer, 0.5 ms at the matrix units' floor, forward and backward.

The queries are rotated and scaled in a pass of their own, and rounded to the dtype in which matrix units take them.

Source: the loss is DeepSeek-V3.2's indexer warm-up; the normaliser is summed up as in Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..index_top_k.triton import Rows, Search, lines_of, members_of, row_chunks, unfit_indexer
from ..launch import launch, power_of_two, unfit
from ..score_slots.triton import add_gradients, alike, score_listed, zeros_for
from .reference import IndexerLoss

LOG2E = 1.4426950408889634


class _Teacher(NamedTuple):
    query: Tensor
    window: Tensor
    bank: Tensor
    sink: Tensor
    cos: Tensor
    sin: Tensor


class _Rows(NamedTuple):
    """What is known of each row besides its vectors."""

    position: Tensor
    first: Tensor
    last: Tensor
    index: Tensor


def refuses(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    bank_BFC: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    index_BRK: Tensor,
    index_query_BRJI: Tensor,
    index_weight_BRJ: Tensor,
    index_key_BFI: Tensor,
    dense: bool = True,
    pool_BRN: Tensor | None = None,
    block: int = 8,
) -> str | None:
    """Why this call is not for the kernels."""
    heads, channels = query_BRHC.shape[2:]
    if not 1 <= heads <= 128 or channels > 128 or channels % 2:
        return f"made for 1 to 128 heads of an even width up to 128, got {heads} of width {channels}"
    needs = unfit_indexer(index_query_BRJI, index_weight_BRJ, index_key_BFI)
    return needs or unfit(query_BRHC, window_BEC, sink_H, cos_BRP, sin_BRP, bank_BFC)


def indexer_kl(
    query_BRHC: Tensor,
    window_BEC: Tensor,
    position_BR: Tensor,
    width: int,
    sink_H: Tensor,
    cos_BRP: Tensor,
    sin_BRP: Tensor,
    bank_BFC: Tensor,
    first_BR: Tensor,
    last_BR: Tensor,
    index_BRK: Tensor,
    index_query_BRJI: Tensor,
    index_weight_BRJ: Tensor,
    index_key_BFI: Tensor,
    dense: bool = True,
    pool_BRN: Tensor | None = None,
    block: int = 8,
) -> IndexerLoss:
    """See `gsm_kernels.indexer_kl`."""
    student = (index_query_BRJI, index_weight_BRJ, index_key_BFI)
    teacher = tuple(x.detach() for x in (query_BRHC, window_BEC, bank_BFC, sink_H, cos_BRP, sin_BRP))
    rows = (position_BR, first_BR, last_BR, index_BRK)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in student)
    return IndexerLoss(*_IndexerKL.apply(*student, *teacher, *rows, pool_BRN, width, dense, block, wants_grad))


class _IndexerKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        loss, recall, *grads = _indexer_kl(*arguments)
        ctx.save_for_backward(*grads)
        ctx.wants_grad, ctx.dtypes = arguments[-1], [x.dtype for x in arguments[:3]]
        ctx.mark_non_differentiable(recall)
        return loss, recall

    @staticmethod
    def backward(ctx, grad, _):
        grads = [(grad * saved).to(dtype) for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *(grads if ctx.wants_grad else (None, None, None)), *(None,) * 15


@torch.library.custom_op("gsm_kernels::indexer_kl", mutates_args=())
def _indexer_kl(
    index_query: Tensor,
    index_weight: Tensor,
    index_key: Tensor,
    query: Tensor,
    window: Tensor,
    bank: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    first: Tensor,
    last: Tensor,
    index: Tensor,
    pool: Tensor | None,
    width: int,
    dense: bool,
    block: int,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    student = alike(index_query, index_weight, index_key)
    teacher = _teacher(query, window, bank, sink, cos, sin)
    rows = _Rows(*(x.contiguous() for x in (position, first, last, index)))
    run = _Run(student, teacher, rows, pool if dense else None, width, dense, block)
    grads = tuple(zeros_for(x) if wants_grad else _none(x) for x in student)
    loss, held, sees = torch.zeros((3, *position.shape), dtype=torch.float32, device=query.device).unbind()
    for part in row_chunks(position.shape, run.per_row()):
        run.chunk(part, loss, held, sees, grads if wants_grad else None)
    count = (position >= 0).sum().clamp(min=1)
    recall = held.sum() / sees.sum() if dense else torch.full_like(loss.sum(), torch.nan)
    query_grad, weight_grad, key_grad = (grad.div_(count) for grad in grads)
    return loss.sum() / count, recall, query_grad, weight_grad, key_grad


@_indexer_kl.register_fake
def _(index_query, index_weight, index_key, query, *rest):
    wants_grad = rest[-1]
    loss, recall = (query.new_empty((), dtype=torch.float32) for _ in range(2))
    student = (index_query, index_weight, index_key)
    return loss, recall, *(x.new_empty(x.shape if wants_grad else (0,), dtype=torch.float32) for x in student)


def _none(x: Tensor) -> Tensor:
    return x.new_empty((0,), dtype=torch.float32)


def _teacher(query: Tensor, window: Tensor, bank: Tensor, sink: Tensor, cos: Tensor, sin: Tensor) -> _Teacher:
    common = torch.promote_types(torch.promote_types(query.dtype, window.dtype), bank.dtype)
    wide = (query, window.to(common), bank.to(common), sink, cos, sin)
    return _Teacher(*(x.contiguous() for x in wide))


class _Run(NamedTuple):
    """One call's tensors, contiguous, with the launches of its kernels for a chunk of rows."""

    student: tuple[Tensor, Tensor, Tensor]
    teacher: _Teacher
    rows: _Rows
    pool: Tensor | None
    width: int
    dense: bool
    block: int

    @property
    def compared(self) -> int:
        return self.teacher.bank.shape[1] if self.dense else self.rows.index.shape[2]

    def per_row(self) -> int:
        """Numbers of four bytes that a row needs: queries, mass, scores, and its pool or the gradients of its keys."""
        heads, channels = self.teacher.query.shape[2:]
        queries = heads * channels * self.teacher.bank.element_size() // 4 + heads
        more = self.compared // self.block // 4 if self.dense else self.compared * self.student[0].shape[3]
        return queries + 2 * self.compared + more

    def chunk(self, part: Rows, loss: Tensor, held: Tensor, sees: Tensor, grads: tuple[Tensor, ...] | None) -> None:
        """Everything of a chunk of rows. Its buffers are gone before the next chunk's are made."""
        mass, score = self.compare(part)
        self.diverge(part, mass, score, loss, held, sees)
        del mass
        if grads is not None:
            self.add_gradients(part, score, grads)

    def compare(self, part: Rows) -> tuple[Tensor, Tensor]:
        """The teacher's mass and the indexer's scores, [lines, slots compared]."""
        query = self._rotated(part)
        if self.dense:
            member = None if self.pool is None else members_of(self.pool, part, self.compared, self.block)
            search = Search(*self.student, *self.rows[1:3])
            mass = self._mass_of_visible(part, query, member)
            return mass, search.best_of_groups(part, 1, member, self.block)
        index = lines_of(self.rows.index, part)
        return self._mass_of_selected(part, query, index), score_listed(*self.student, index, part)

    def diverge(self, part: Rows, mass: Tensor, score: Tensor, loss: Tensor, held: Tensor, sees: Tensor) -> None:
        """Write each row's loss, mass held and whether it sees a slot; put the scores' gradient in their place."""
        from .kernels import divergence

        position, first, last, _ = self.rows
        index = lines_of(self.rows.index, part)
        sizes = (*self._place(part), self.compared, index.shape[1])
        args = (mass, score, position, first, last, index, loss, held, sees, *sizes)
        # 2,048 numbers at a time are 16 a thread, and the row of the usual length is read at once.
        launch(divergence, (part.lines,), *args, DENSE=self.dense, BLOCK=min(power_of_two(self.compared, 16), 2048))

    def add_gradients(self, part: Rows, score_grad: Tensor, grads: tuple[Tensor, ...]) -> None:
        """Write the gradients of a chunk's queries and weights, and add that of the keys."""
        query_grad, weight_grad, key_grad = grads
        if not self.dense:
            index = lines_of(self.rows.index, part)
            add_gradients((query_grad, weight_grad, key_grad), score_grad, *self.student, index, part)
            return
        from .kernels_dense import key_gradients, query_gradients

        heads, width = self.student[0].shape[2:]
        tile = {"J": heads, "I": width, "WIDTH": power_of_two(width, 16), **_tile(self.student[0].dtype, 64)}
        row_tiles, slot_tiles = -(-part.rows // tile["ROWS"]), -(-self.compared // tile["SLOTS"])
        common = (*self.student, score_grad, *self.rows[:3])
        place = (*self._place(part), self.compared)
        grid = (part.batches * row_tiles * heads,)
        launch(query_gradients, grid, *common, query_grad, weight_grad, *place, row_tiles, **tile)
        splits = _splits(part.batches * slot_tiles, row_tiles)
        parts = key_grad.new_empty((splits, part.batches, self.compared, width))
        grid = (splits * part.batches * slot_tiles,)
        tile["ROWS"] = 32  # keys and their gradient stay in registers
        launch(key_gradients, grid, *common, parts, *place, slot_tiles, splits, part.batches, **tile)
        key_grad[part.batch0 : part.batch0 + part.batches] += parts.sum(0)

    def _rotated(self, part: Rows) -> Tensor:
        from .kernels import rotate

        query, _, bank, _, cos, sin = self.teacher
        heads, channels = query.shape[2:]
        out = torch.empty((part.lines, heads, channels), dtype=bank.dtype, device=bank.device)
        row0, scale = part.batch0 * query.shape[1] + part.row0, channels**-0.5 * LOG2E
        args = (query, cos, sin, out, row0, part.lines, scale, cos.shape[2])
        launch(rotate, (-(-out.numel() // 1024),), *args, H=heads, C=channels, BLOCK=1024, num_warps=4)
        return out

    def _mass_of_visible(self, part: Rows, query: Tensor, member: Tensor | None) -> Tensor:
        from .kernels import mass_of_visible, normaliser

        (position, first, last, _), (_, window, bank, sink, _, _) = self.rows, self.teacher
        slots, (heads, channels) = self.compared, query.shape[1:]
        below = query.new_empty((part.lines, heads), dtype=torch.float32)
        mass = query.new_empty((part.lines, slots), dtype=torch.float32)
        pool = first if member is None else member
        tile = {"H": heads, "C": channels, "POOLED": member is not None, "WIDTH": power_of_two(channels, 16)}
        tile |= _tile(bank.dtype, 128)
        row_tiles, slot_tiles = -(-part.rows // tile["ROWS"]), -(-slots // tile["SLOTS"])
        args = (query, window, bank, sink, position, first, last, pool, below, *self._place(part))
        sizes = (window.shape[1], slots, self.width, row_tiles, pool.shape[1], self.block)
        launch(normaliser, (part.batches * row_tiles * heads,), *args, *sizes, **tile)
        args = (query, bank, below, position, first, last, pool, mass, *self._place(part))
        sizes = (slots, row_tiles, slot_tiles, pool.shape[1], self.block)
        launch(mass_of_visible, (part.batches * row_tiles * slot_tiles,), *args, *sizes, **tile)
        return mass

    def _mass_of_selected(self, part: Rows, query: Tensor, index: Tensor) -> Tensor:
        from .kernels import mass_of_selected

        _, window, bank, sink, _, _ = self.teacher
        heads, channels = query.shape[1:]
        mass = torch.empty(index.shape, dtype=torch.float32, device=index.device)
        args = (query, window, bank, sink, self.rows.position, index, mass, *self._place(part))
        sizes = (window.shape[1], bank.shape[1], self.width, index.shape[1])
        tile: dict[str, Any] = {"HEADS": power_of_two(heads, 16), "WIDTH": power_of_two(channels, 16)}
        wide = bank.dtype == torch.float32
        tile |= {"H": heads, "C": channels, "SLOTS": 16 if wide else 64, "num_warps": 8 if wide else 4}
        launch(mass_of_selected, (part.lines,), *args, *sizes, **tile, num_stages=2)
        return mass

    def _place(self, part: Rows) -> tuple[int, int, int, int]:
        return part.batch0, part.row0, part.rows, self.rows.position.shape[1]


def _tile(dtype: torch.dtype, slots: int) -> dict[str, int]:
    """64 x 128 logits of one head and as many sums are 64 registers each in 128 threads; see `index_top_k`. Gradients
    hold two more such tiles and take half as many slots; so does float32, whose products are made from registers."""
    if dtype == torch.float32:
        return {"ROWS": 32, "SLOTS": 32, "num_warps": 8, "num_stages": 1}
    return {"ROWS": 64, "SLOTS": slots, "num_warps": 4, "num_stages": 2}


def _splits(tiles: int, row_tiles: int) -> int:
    """Parts of the rows that keys' gradients are summed in: enough to give each of 132 multiprocessors two programs."""
    return max(min(-(-264 // max(tiles, 1)), row_tiles), 1)
