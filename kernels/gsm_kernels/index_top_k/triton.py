"""Exact top-k selection in Triton, without storing all scores of a row: first groups of neighbouring slots, then slots.

1. A kernel computes all scores tile by tile, and stores the highest of every GROUP neighbouring slots.
2. A kernel chooses the k groups with the highest maxima.
3. The scores of the k * GROUP slots in these groups are computed again, and a kernel chooses the k highest.

The k best slots are in the k best groups: for a slot in any other group, each of the k best groups contains a slot with
a higher score, or an equal score and a lower number. With few slots, GROUP is 1 and step 2 is the last. With many rows,
step 2 itself has two steps: first the k best spans of neighbouring groups, then the k best groups of these. Steps 2 and
3 hold their candidates in registers, and find the k-th highest score bit by bit, without sorting. The buffers of a row
have at most F / GROUP <= 8,192 maxima and k * GROUP scores.

Steps 1 and 3 may round a score differently, because their tiles have different shapes. Groups are chosen by the first
score, and slots by the second. If the sums are exact, as for small integers, both scores are equal.

A candidate pool is applied as a mask. All scores are still computed, because gathering the keys of each row's pool
would cost as much as it saves. `candidate_pool` stores the scores of a chunk of rows, and takes the maxima of blocks
that are counted from the first slot of each row.

Source: the score of DeepSeek-V3.2's lightning indexer; step 2 is a radix selection with digits of one bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..indexer import Indexer
from ..launch import cdiv, in_float32, launch, power_of_two
from ..register import register
from ..rows import Rows, lines_of, row_chunks
from ..score_slots.triton import score_listed
from ..tiles import Tile, launch_fastest
from .inputs import Inputs, chosen

GROUPS = 8192  # largest number of groups, among which one program chooses: 16 in the registers of each of 512 threads
ALONE = 132  # up to this number of rows, one per multiprocessor, a single step without spans is faster
MOST = 16384  # largest number of slots or blocks among which one program can choose


def refuses(inputs: Inputs) -> str | None:
    """Return why the kernels cannot take this call of `index_top_k`, or None."""
    slots = inputs.key_BFI.shape[1]
    group = group_size(slots)
    if max(inputs.k * group, slots // group) > MOST or group > 64:
        return f"chooses among at most {MOST} slots at a time, got k = {inputs.k} of {slots} slots"
    return inputs.indexer.unfit() or in_float32(inputs.query_BRJI, inputs.key_BFI)


def refuses_pool(inputs: Inputs) -> str | None:
    """Return why the kernels cannot take this call of `candidate_pool`, or None."""
    slots, blocks, block = inputs.key_BFI.shape[1], inputs.k, inputs.block
    if max(blocks, cdiv(slots, block)) > MOST:
        return f"chooses among at most {MOST} blocks, got {slots} slots in blocks of {block} and {blocks} to choose"
    return inputs.indexer.unfit() or in_float32(inputs.query_BRJI, inputs.key_BFI)


@torch.no_grad()
def index_top_k(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.index_top_k`."""
    return _slots(*inputs)


@torch.no_grad()
def candidate_pool(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.index_top_k`."""
    return _blocks(*inputs)


def _index_top_k(*arguments: Any) -> Tensor:
    inputs = Inputs(*arguments)
    search, index = Search.of(inputs), chosen(*arguments)
    slots, k, pool, block = inputs.key_BFI.shape[1], inputs.k, inputs.pool_BRN, inputs.block
    group = group_size(slots)
    per_row = cdiv(slots, group) + (k * (group + 1) if group > 1 else 0) + (0 if pool is None else slots // block // 4)
    for part in row_chunks(index.shape, per_row):
        search.top_k(part, group, pool, block, lines_of(index, part))
    return index


def _candidate_pool(*arguments: Any) -> Tensor:
    inputs = Inputs(*arguments)
    search, pool, block = Search.of(inputs), chosen(*arguments), inputs.block
    for part in row_chunks(pool.shape, inputs.key_BFI.shape[1]):
        search.choose_blocks(search.best_of_groups(part, 1, None, block), part, block, lines_of(pool, part))
    return pool


_slots = register("index_top_k", _index_top_k, chosen, takes=Inputs)
_blocks = register("candidate_pool", _candidate_pool, chosen, takes=Inputs)


class Search(NamedTuple):
    """The contiguous inputs of a search, and the launches of its kernels for a chunk of rows.

    Attributes:
        indexer: queries, weights and keys.
        first, last: the range of slots that each row sees, [B,R].
    """

    indexer: Indexer
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Search:
        """Return the search for the inputs of a call."""
        return cls(inputs.indexer.readable(), inputs.first_BR.contiguous(), inputs.last_BR.contiguous())

    def top_k(self, part: Rows, group: int, pool: Tensor | None, block: int, out: Tensor) -> None:
        """Write the best slots of a chunk to `out` [lines, k]."""
        member = None if pool is None else members_of(pool, part, self.indexer.key_BFI.shape[1], block)
        best = self.best_of_groups(part, group, member, block)
        if group == 1:
            self.choose(best, part, 1, out)
            return
        groups = torch.empty((part.lines, out.shape[-1]), dtype=torch.int32, device=best.device)
        self.choose(best, part, group, groups)
        del best
        self.choose_listed(groups, part, group, member, block, out)

    def best_of_groups(self, part: Rows, group: int, member: Tensor | None, block: int) -> Tensor:
        """Return the highest score of each group, float32 [lines, groups]; uninitialised in tiles that no row sees."""
        from .kernels import best_of_groups

        key = self.indexer.key_BFI
        slots, (heads, width) = key.shape[1], self.indexer.query_BRJI.shape[2:]
        best = key.new_empty((part.lines, cdiv(slots, group)), dtype=torch.float32)
        pooled = best if member is None else member
        tensors = (*self.indexer, self.first, self.last, pooled, best)
        counts = (*part.place(self.first.shape[1]), slots, best.shape[1], pooled.shape[1], block)
        sizes = {"J": heads, "I": width, "GROUP": group, "POOLED": member is not None, "WIDTH": power_of_two(width, 16)}
        tiles = score_tiles(part.rows, key.dtype)

        def grid(tile: dict[str, int]) -> tuple[int]:
            return (part.batches * cdiv(part.rows, tile["ROWS"]) * cdiv(slots, tile["SLOTS"]),)

        launch_fastest("index_top_k.best_of_groups", best_of_groups, grid, (*tensors, *counts), tiles, **sizes)
        return best

    def choose(self, best: Tensor, part: Rows, group: int, out: Tensor) -> None:
        """Write the numbers of each row's best groups, from their maxima, to `out` [lines, k]."""
        from .kernels import choose

        sizes = (*part.place(self.first.shape[1]), best.shape[1], out.shape[-1])
        span = span_size(best.shape[1], out.shape[-1]) if part.lines > ALONE else 1
        options = {**choice(cdiv(best.shape[1], span), out.shape[-1], span), "GROUP": group, "SPAN": span}
        launch(choose, (part.lines,), best, self.first, self.last, out, *sizes, **options)

    def choose_listed(
        self, groups: Tensor, part: Rows, group: int, member: Tensor | None, block: int, out: Tensor
    ) -> None:
        """Write the best slots of each row's groups [lines, k] to `out` [lines, k]."""
        from .kernels import choose_listed

        k = groups.shape[1]
        score = score_listed(self.indexer, groups, part, group)
        pooled = groups if member is None else member
        sizes = (*part.place(self.first.shape[1]), k * group, pooled.shape[1], block, k)
        options = {**choice(k * group, k), "GROUP": group, "POOLED": member is not None}
        launch(choose_listed, (part.lines,), score, groups, self.first, self.last, pooled, out, *sizes, **options)

    def choose_blocks(self, score: Tensor, part: Rows, block: int, out: Tensor) -> None:
        """Write the numbers of each row's best blocks, from all scores, to `out` [lines, k]."""
        from .kernels import choose_blocks

        sizes = (*part.place(self.first.shape[1]), score.shape[1], block, out.shape[-1])
        options = choice(cdiv(score.shape[1], block), out.shape[-1])
        launch(choose_blocks, (part.lines,), score, self.first, self.last, out, *sizes, **options)


def score_tiles(rows: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the candidates for a program's tile of scores, ROWS x SLOTS.

    64 x 128 products of one head take 64 registers in each of 128 threads, and so do the sums over heads. Then two
    programs share a multiprocessor, and one multiplies matrices while the other sums. Few rows have small tiles, so
    that there are enough programs; so has float32, which does not use tensor cores.
    """
    if rows <= 16:
        shapes = [(16, 128, 2)]
    else:
        shapes = [(32, 64, 2)] if dtype == torch.float32 else [(64, 128, 3), (64, 64, 3)]
    names = ("ROWS", "SLOTS", "num_stages")
    return tuple((*zip(names, shape, strict=True), ("num_warps", 4)) for shape in shapes)


def choice(size: int, k: int, span: int = 1) -> dict[str, int]:
    """Return launch options to choose k of `size` numbers, then k of `k * span`, with up to 16 numbers per thread.

    More numbers per thread would leave too few registers for the sums.
    """
    sizes = {"SIZE": power_of_two(size, 16), "K": power_of_two(k, 1)}
    most = max(sizes["SIZE"], sizes["K"] * span)
    return {**sizes, "num_warps": min(max(most // 512, 4), 16)}


def group_size(slots: int) -> int:
    """Return the number of slots per group: the smallest power of two that gives at most GROUPS groups."""
    return power_of_two(cdiv(slots, GROUPS), 1)


def span_size(groups: int, k: int) -> int:
    """Return the number of groups per span, or 1 for no spans.

    The two steps search groups / span and k * span numbers; their sum is smallest for span = sqrt(groups / k).
    """
    span = power_of_two(int((groups / k) ** 0.5) + 1) // 2
    return span if span > 2 else 1


def members_of(pool_BRN: Tensor, part: Rows, slots: int, block: int) -> Tensor:
    """Return which blocks are in the pool of each row of a chunk, int8 [lines, blocks]: 0 or 1."""
    ordinals = slots // block + 1
    pool = pool_BRN[part.batch0 : part.batch0 + part.batches, part.row0 : part.row0 + part.rows].flatten(0, 1)
    member = torch.zeros((part.lines, ordinals + 1), dtype=torch.int8, device=pool.device)
    return member.scatter_(1, torch.where(pool < 0, ordinals, pool.clamp(max=ordinals)), 1)
